"""Compressor from a codec: terms and sums are encoded, as in `collectives.compressed`."""

from __future__ import annotations

import numpy as np

from collectives import Communicator
from collectives.compressed import Codec, HierarchicalAllreduce, Motion, SegmentedAllreduce, crowded


class CodecCompressor:
    """Encoded allreduce of `count` elements in two shots, segment by segment.

    With several ranks on several nodes, the ranks of a node are summed first, as they share its link.
    """

    def __init__(self, comm: Communicator, count: int, codec: Codec, feedback: bool = True):
        self.feedback = feedback
        self._sum = (HierarchicalAllreduce if crowded(comm) else SegmentedAllreduce)(comm, count, codec)

    def exchange(self, x: np.ndarray, out: np.ndarray, lost: np.ndarray | None, step: int) -> Motion:
        yield from self._sum.allreduce(x, out, lost)

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def close(self) -> None:
        self._sum.close()
