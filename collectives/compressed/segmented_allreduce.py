"""A sum cut into segments: one is encoded or decoded while another is on its way."""

from __future__ import annotations

import numpy as np

from collectives.communicator import Communicator
from collectives.compressed.bound_collective import BoundCollective, Motion, staggered
from collectives.compressed.codec import Codec, required_codec, within
from collectives.compressed.partition import VectorPartition
from collectives.compressed.two_shot_and_ring import FlatAllreduce, TwoShotAllreduce

SEGMENT = 1 << 17
"""Bytes of a message from rank to rank: shorter ones cost more to start than they hide."""

MOST = 8
"""Segments, at most: with so many an eighth of the encoding is not hidden."""


class SegmentedAllreduce(BoundCollective):
    """A sum by segments, two of them abreast. Groups that share a scale are whole: with codes rounded to the
    nearest the digits are those of two shots in one segment.

    Parameters
    ----------
    comm : Communicator
    count : int
    codec : Codec
    flat : class of Flat
        What sums a segment.
    segments : int, optional
        By default as many as leave messages of `SEGMENT` bytes.
    """

    def __init__(
        self,
        comm: Communicator,
        count: int,
        codec: Codec,
        flat: type[FlatAllreduce] = TwoShotAllreduce,
        segments: int | None = None,
    ):
        required_codec(codec)
        if segments is None:
            segments = min(MOST, max(1, codec.nbytes(count) // (comm.Get_size() * SEGMENT)))
        if segments < 1:
            raise ValueError(f"segments: expected 1 or more, found {segments}")
        self._cuts = VectorPartition.even(count, segments, codec.block, codec.nbytes)
        places = zip(self._cuts.starts, self._cuts.lengths)
        self.segments = [flat(comm, length, within(codec, start, length)) for start, length in places]

    def allreduce(self, x: np.ndarray, out: np.ndarray, lost: np.ndarray | None = None) -> Motion:
        """`out` = the sum of all ranks' x, which it may be; `lost` as of `FlatAllreduce.allreduce`."""

        def of(number: int) -> Motion:
            term, total = self._cuts.of_vector(x, number), self._cuts.of_vector(out, number)
            missing = None if lost is None else self._cuts.of_vector(lost, number)
            return self.segments[number].allreduce(term, total, missing)

        return staggered(of(number) for number in range(len(self.segments)))

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
