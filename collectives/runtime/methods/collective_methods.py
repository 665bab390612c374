"""Collectives on arrays as blocking, non-blocking and persistent methods; the stub beside has their signatures."""

from collectives.runtime.methods.collective_forms import add_methods
from collectives.runtime.methods.inherited_methods import Inherited


class CollectiveMethods(Inherited):
    """Collectives on arrays, each as a blocking, a non-blocking and a persistent method."""


add_methods(CollectiveMethods)
