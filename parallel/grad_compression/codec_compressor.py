"""A compressor out of a codec: terms and sums are encoded, as `collectives.compressed` does it."""

from __future__ import annotations

import numpy as np

from collectives import Communicator
from collectives.compressed import Codec, HierarchicalAllreduce, Motion, SegmentedAllreduce, crowded


class CodecCompressor:
    """Every rank's gradient is encoded, and the sum again, in two shots, segment by segment.

    Where there are several nodes with several ranks, that of every node is: a node's ranks share its wire.

    Parameters
    ----------
    comm : Communicator
    count : int
        Elements of the gradient.
    codec : Codec
    feedback : bool
    """

    def __init__(self, comm: Communicator, count: int, codec: Codec, feedback: bool = True):
        self.feedback = feedback
        self._sum = (HierarchicalAllreduce if crowded(comm) else SegmentedAllreduce)(comm, count, codec)

    def exchange(self, x: np.ndarray, out: np.ndarray, lost: np.ndarray | None, step: int) -> Motion:
        """As `parallel.grad_compression.Compressor`."""
        yield from self._sum.allreduce(x, out, lost)

    def state(self) -> dict[str, np.ndarray]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Collective."""
        self._sum.close()
