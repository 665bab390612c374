"""Sums of squares of a vector's blocks, of all ranks, in one order: what norms and clipping are made from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from parallel.flat import BLOCK, Span
from parallel.hall import Hall


class Blocks:
    """Which blocks of the flat vector each rank knows.

    Parameters
    ----------
    hall : Hall
    spans : sequence of sequence of Span
        Rank by rank; together they make up the vector.
    """

    def __init__(self, hall: Hall, spans: Sequence[Sequence[Span]]):
        self._hall = hall
        ranges = [np.arange(span.start // BLOCK, span.stop // BLOCK) for some in spans for span in some]
        self._order = np.concatenate([np.zeros(0, np.int64), *ranges])
        self._counts = [sum(span.size for span in some) // BLOCK for some in spans]
        self._starts = list(accumulate(self._counts[:-1], initial=0))
        self._arriving = hall.memory.on_host("buffers", len(self._order), np.float64)

    def gather(self, mine: np.ndarray) -> np.ndarray:
        """Every block's number, float64, in the order of the vector, from those of each rank's spans. Collective."""
        with self._hall.recorder("communication", "gather block sums"):
            self._hall.comm.Allgatherv(np.ascontiguousarray(mine, np.float64), [self._arriving, self._counts])
        whole = np.empty_like(self._arriving)
        whole[self._order] = self._arriving
        return whole


def blocks_of(span: Span) -> slice:
    """The blocks of a span, in the vector of all blocks."""
    return slice(span.start // BLOCK, span.stop // BLOCK)
