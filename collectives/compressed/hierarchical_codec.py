"""Allreduce that is exact within nodes and encoded between them."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.compressed.bound_collective import BoundCollective, Motion
from collectives.compressed.codec import Codec, required_codec
from collectives.compressed.segmented_allreduce import SegmentedAllreduce


def crowded(comm: Communicator) -> bool:
    """True with several nodes and several ranks on one: reducing within nodes first then sends least."""
    return 1 < len(set(comm.nodes or ())) < comm.Get_size()


class HierarchicalAllreduce(BoundCollective):
    """Exact sums of nodes in shared memory; their leaders exchange encoded sums, and broadcast within their nodes."""

    def __init__(self, comm: Communicator, count: int, codec: Codec) -> None:
        required_codec(codec)
        nodes = comm.nodes or (0,) * comm.Get_size()
        self._node = comm.Split(nodes[comm.Get_rank()], comm.Get_rank())
        leads = self._node.Get_rank() == 0
        self._leaders = comm.Split(0 if leads else MPI.UNDEFINED, comm.Get_rank())
        self._between = SegmentedAllreduce(self._leaders, count, codec) if leads else None
        self._sum = self._node.empty(count, np.float32)

    def allreduce(self, x: np.ndarray, out: np.ndarray, lost: np.ndarray | None = None) -> Motion:
        """Store the sum of all ranks' x in `out`, which may be x; `lost` is nonzero on leaders only."""
        yield [self._node.Ireduce(x, self._sum, MPI.SUM, 0)]
        if lost is not None:
            lost[...] = 0
        if self._between is not None:
            yield from self._between.allreduce(self._sum, self._sum, lost)
        yield [self._node.Ibcast(self._sum, 0)]
        out[...] = self._sum

    def close(self) -> None:
        self._node.Free()
        if self._between is not None:
            self._between.close()
        if self._leaders != MPI.COMM_NULL:
            self._leaders.Free()
