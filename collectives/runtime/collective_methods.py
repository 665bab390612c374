"""Collectives on arrays as methods, in three forms each; the stub beside this module has their signatures."""

from collectives.runtime.collective_forms import add_methods
from collectives.runtime.inherited_methods import Inherited


class CollectiveMethods(Inherited):
    """Collectives on arrays, in three forms each."""


add_methods(CollectiveMethods)
