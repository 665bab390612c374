"""Gradient norm: sums of squares of all blocks, gathered from all ranks in one order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from parallel.data_parallel.run_context import RunContext
from parallel.nn.flat_params import BLOCK, Span


class SquaredBlocks:
    """Gather of per-block sums: each rank knows the blocks of its spans (`spans` rank by rank)."""

    def __init__(self, context: RunContext, spans: Sequence[Sequence[Span]]):
        self._context = context
        self._order = numbers_of(span for some in spans for span in some)
        self._counts = [sum(span.size for span in some) // BLOCK for some in spans]
        self._starts = list(accumulate(self._counts[:-1], initial=0))
        self._arriving = context.memory.on_host("buffers", len(self._order), np.float64)

    def gather(self, mine: np.ndarray) -> np.ndarray:
        """Sum of every block, float64, in the order of the vector, from those of each rank's spans. Collective."""
        with self._context.recorder("communication", "gather block sums"):
            self._context.comm.Allgatherv(np.ascontiguousarray(mine, np.float64), [self._arriving, self._counts])
        return in_order(self._arriving, self._order)


def numbers_of(spans: Iterable[Span]) -> np.ndarray:
    """Numbers of the spans' blocks, one span after another.

    >>> numbers_of([Span(512, 1024), Span(0, 256)]).tolist()
    [2, 3, 0]
    """
    ranges = [np.arange(span.start // BLOCK, span.stop // BLOCK) for span in spans]
    return np.concatenate([np.zeros(0, np.int64), *ranges])


def in_order(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Value of each block, in the order of the vector; the k-th value is that of block ``numbers[k]``."""
    whole = np.empty_like(values)
    whole[numbers] = values
    return whole


def blocks_of(span: Span) -> slice:
    return slice(span.start // BLOCK, span.stop // BLOCK)
