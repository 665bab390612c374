"""Compressed allreduces: by segments (encoding overlaps messages), and between the leaders of nodes only."""

from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.compressed.bound_collective import BoundCollective, Motion, staggered
from collectives.compressed.codec import Codec, required_codec, within
from collectives.compressed.partition import VectorPartition
from collectives.compressed.two_shot_and_ring import TwoShotAllreduce
from quant.types import Array

SEGMENT = 1 << 17
"""Bytes of a message from rank to rank: shorter ones cost more to start than they hide."""

MOST = 8
"""Maximum number of segments: with this number an eighth of the encoding is not hidden."""


class SegmentedAllreduce(BoundCollective):
    """Two-shot allreduce by segments: one is encoded or decoded while another's messages are in flight.

    Groups that share a scale are not cut: with rounding to nearest, the result equals the result of one segment.
    By default the number of `segments` gives messages of at least `SEGMENT` bytes, and is at most `MOST`. With
    ``like=cupy`` vectors are on a GPU (see `FlatAllreduce`), by default in one segment: kernels end before a message
    starts.
    """

    def __init__(
        self, comm: Communicator, count: int, codec: Codec, segments: int | None = None, like: Any = None
    ) -> None:
        required_codec(codec)
        if segments is None:
            most = MOST if like is None else 1
            segments = min(most, max(1, codec.nbytes(count) // (comm.Get_size() * SEGMENT)))
        if segments < 1:
            raise ValueError(f"segments: expected 1 or more, found {segments}")
        self._cuts = VectorPartition.even(count, segments, codec.block, codec.nbytes)
        cuts = zip(self._cuts.starts, self._cuts.lengths)
        self.segments = [
            TwoShotAllreduce(comm, length, within(codec, start, length), like=like) for start, length in cuts
        ]

    def allreduce(self, x: Array, out: Array, lost: Array | None = None) -> Motion:
        """Sum all ranks' x into `out` (may be x). Yield requests to wait for. `FlatAllreduce` describes `lost`."""

        def part(vector: Array, number: int) -> Array:
            return self._cuts.of_vector(vector, number)

        return staggered(
            segment.allreduce(part(x, number), part(out, number), None if lost is None else part(lost, number))
            for number, segment in enumerate(self.segments)
        )

    def close(self) -> None:
        for segment in self.segments:
            segment.close()


def crowded(comm: Communicator) -> bool:
    """True if there are several nodes and any has several ranks: reducing within nodes first then sends least."""
    return 1 < len(set(comm.nodes or ())) < comm.Get_size()


class HierarchicalAllreduce(BoundCollective):
    """Allreduce: plain reduce within nodes, compressed allreduce among node leaders, plain broadcast within nodes."""

    def __init__(self, comm: Communicator, count: int, codec: Codec, like: Any = None) -> None:
        required_codec(codec)
        nodes = comm.nodes or (0,) * comm.Get_size()
        self._node = comm.Split(nodes[comm.Get_rank()], comm.Get_rank())
        leads = self._node.Get_rank() == 0
        self._leaders = comm.Split(0 if leads else MPI.UNDEFINED, comm.Get_rank())
        self._between = SegmentedAllreduce(self._leaders, count, codec, like=like) if leads else None
        self._sum = self._node.empty(count, np.float32, like)

    def allreduce(self, x: Array, out: Array, lost: Array | None = None) -> Motion:
        """Sum all ranks' x into `out` (may be x). Yield requests to wait for.

        `lost` receives the encoding error of the node's sum on its leader, and 0 on other ranks.
        """
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
