"""Collectives on arrays as blocking, non-blocking and persistent methods. The stub beside has their signatures."""

from collectives.runtime.methods.collective_forms import DECLARATIONS, NEIGHBOR_DECLARATIONS, add_methods
from collectives.runtime.methods.inherited_methods import Inherited


class CollectiveMethods(Inherited):
    """Collectives on arrays, each as a blocking, a non-blocking and a persistent method."""


class NeighborMethods(Inherited):
    """Collectives of neighbours in a topology, each as a blocking, a non-blocking and a persistent method."""


add_methods(CollectiveMethods, DECLARATIONS)
add_methods(NeighborMethods, NEIGHBOR_DECLARATIONS)
