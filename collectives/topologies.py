"""Communicators with a topology: as mpi4py's, with collectives of neighbours that are schedules of Chorus."""

# mypy: disable-error-code="override, misc"

from __future__ import annotations

from functools import cached_property

from mpi4py import MPI

from collectives.algorithms.neighbors import Neighbors
from collectives.communicator import Communicator, adopting, topology_classes
from collectives.runtime.methods.collective_forms import DECLARATIONS, NEIGHBOR_DECLARATIONS
from collectives.runtime.methods.object_methods import NeighborObjectMethods


class TopologyCommunicator(Communicator, NeighborObjectMethods, MPI.Topocomm):
    """`Communicator` with a topology, and with the collectives of neighbours in it. Made by its methods `Create_...`.

    The order of blocks is MPI's: of a grid, in each dimension the neighbour before a rank comes first, then the one
    after it. What a rank sends to the one after it arrives there as from the one before it, also if both are one rank
    (MPI 4.1, Neighborhood Collective Communication; Intel MPI differs). Blocks of neighbours that do not exist, at the
    border of a grid, are not accessed.

    Examples
    --------
    >>> import numpy as np
    >>> from collectives import Communicator
    >>> ring = Communicator(MPI.COMM_SELF).Create_cart([1], periods=[True])
    >>> received = np.empty(2)
    >>> ring.Neighbor_alltoall(np.array([1.0, 2.0]), received)
    >>> received.tolist(), isinstance(ring, MPI.Cartcomm)
    ([2.0, 1.0], True)
    >>> ring.Free()
    """

    _declarations = (*DECLARATIONS, *NEIGHBOR_DECLARATIONS)

    @property
    def plain(self) -> MPI.Topocomm:
        return MPI.Topocomm(self)

    @cached_property
    def _neighbors(self) -> Neighbors:
        sources, destinations = (tuple(max(-1, rank) for rank in side) for side in self.inoutedges)
        return Neighbors.of_graph(sources, destinations)


class CartCommunicator(TopologyCommunicator, MPI.Cartcomm):
    """`TopologyCommunicator` of a Cartesian grid."""

    Sub = adopting("Sub")

    @property
    def plain(self) -> MPI.Cartcomm:
        return MPI.Cartcomm(self)

    @cached_property
    def _neighbors(self) -> Neighbors:
        return Neighbors.of_grid(tuple(max(-1, rank) for rank in self.inedges))


class GraphCommunicator(TopologyCommunicator, MPI.Graphcomm):
    """`TopologyCommunicator` of a graph that all ranks have given."""


class DistGraphCommunicator(TopologyCommunicator, MPI.Distgraphcomm):
    """`TopologyCommunicator` of a graph of which each rank has given a part."""


topology_classes |= {MPI.CART: CartCommunicator, MPI.GRAPH: GraphCommunicator, MPI.DIST_GRAPH: DistGraphCommunicator}
