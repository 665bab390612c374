"""Exact within nodes, encoded between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    """Sums of nodes are exact and stay in memory; their leaders exchange encoded ones, then tell their nodes.

    Parameters
    ----------
    comm : Communicator
    count : int
    codec : Codec
    flat : callable (leaders, count, codec) -> what sums
        What the leaders do.
    """

    def __init__(self, comm: Communicator, count: int, codec: Codec, flat: Callable[..., Any] = SegmentedAllreduce):
        required_codec(codec)
        nodes = comm.nodes or (0,) * comm.Get_size()
        self._node = comm.Split(nodes[comm.Get_rank()], comm.Get_rank())
        first = self._node.Get_rank() == 0
        self._leaders = comm.Split(0 if first else MPI.UNDEFINED, comm.Get_rank())
        self._flat = flat(self._leaders, count, codec) if first else None
        self._sum = self._node.empty(count, np.float32)

    def allreduce(self, x: np.ndarray, out: np.ndarray, lost: np.ndarray | None = None) -> Motion:
        """`out` = the sum of all ranks' x, which it may be; `lost` is not 0 on leaders only."""
        yield [self._node.Ireduce(x, self._sum, MPI.SUM, 0)]
        if lost is not None:
            lost[...] = 0
        if self._flat is not None:
            yield from self._flat.allreduce(self._sum, self._sum, lost)
        yield [self._node.Ibcast(self._sum, 0)]
        out[...] = self._sum

    def close(self) -> None:
        self._node.Free()
        if self._flat is not None:
            self._flat.close()
        if self._leaders != MPI.COMM_NULL:
            self._leaders.Free()
