"""Pruning during training: passes compute with the weights of largest magnitude, all weights keep being trained.

The mask follows from the present weights in every pass, and a weight that grows comes back (S. Guo et al., "Dynamic
network surgery", NIPS 2016; T. Lin et al., "Dynamic model pruning with feedback", ICLR 2020). The pruned fraction
rises as a cubic curve (M. Zhu, S. Gupta, "To prune, or not to prune", 2017).
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from parallel.nn import kernels
from quant.types import Array


def magnitude_mask(matrix: Array, sparsity: float) -> Array:
    """True for the elements to keep: all but the round(sparsity * n) of n elements that are smallest in magnitude."""
    return _largest(abs(matrix).reshape(-1), sparsity).reshape(matrix.shape)


def row_mask(matrix: Array, sparsity: float) -> Array:
    """True in the rows (outputs) to keep: all but the round(sparsity * n) of n rows that have the smallest norm."""
    kept = _largest((matrix * matrix).sum(axis=1), sparsity)
    return kernels.array_namespace(matrix).broadcast_to(kept[:, None], matrix.shape)


def _largest(sizes: Array, sparsity: float) -> Array:
    xp = kernels.array_namespace(sizes)
    kept, dropped = xp.ones(len(sizes), bool), round(sparsity * len(sizes))
    if dropped:
        kept[xp.argpartition(sizes, dropped - 1)[:dropped]] = False
    return kept


def group_mask(matrix: Array, keep: int, size: int) -> Array:
    """True for the `keep` elements of largest magnitude among `size` neighbours of a row (Zhou et al., ICLR 2021).

    A shorter group at the end of a row keeps as many.

    >>> import numpy as np
    >>> group_mask(np.array([[1.0, -3.0, 2.0, 0.0, 5.0]]), 2, 4)
    array([[False,  True,  True, False,  True]])
    """
    xp, (rows, length) = kernels.array_namespace(matrix), matrix.shape
    padded = xp.full((rows, -(-length // size) * size), -1.0, matrix.dtype)
    padded[:, :length] = abs(matrix)
    groups = padded.reshape(-1, size)
    kept = xp.zeros(groups.shape, bool)
    xp.put_along_axis(kept, xp.argpartition(groups, size - keep, axis=1)[:, size - keep :], True, axis=1)
    return kept.reshape(padded.shape)[:, :length]


PATTERNS: dict[str, Callable[[Array, float], Array]] = {"elements": magnitude_mask, "rows": row_mask}
"""Functions of a weight matrix (outputs, inputs) and a sparsity, by pattern; ``N:M`` patterns have a fixed sparsity."""


class Pruning(NamedTuple):
    """Weight function that sets the smallest weights to 0; the fraction reaches `sparsity` after `ramp` steps.

    `pattern` is a key of `PATTERNS`, or ``N:M`` to keep N of M neighbours, from the first step on.

    >>> [round(Pruning(0.8, ramp=10).fraction(step), 3) for step in (0, 5, 10, 99)]
    [0.0, 0.7, 0.8, 0.8]
    """

    sparsity: float
    pattern: str = "elements"
    ramp: int = 0

    def fraction(self, step: int) -> float:
        """Pruned fraction of the weights in a step."""
        left = max(0.0, 1 - step / self.ramp) if self.ramp else 0.0
        return self.sparsity * (1 - left**3)

    def values(self, matrix: Array, step: int) -> Array:
        """Weight function: the matrix with 0 for pruned weights."""
        return matrix * self.mask(matrix, step)

    def mask(self, matrix: Array, step: int) -> Array:
        """True for the weights that are kept."""
        if self.pattern in PATTERNS:
            return PATTERNS[self.pattern](matrix, self.fraction(step))
        return group_mask(matrix, *of_neighbours(self.pattern))


def of_neighbours(pattern: str) -> tuple[int, int]:
    """(N, M) of a pattern N:M; ValueError if it is none, or not 1 <= N <= M."""
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", pattern)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"expected {', '.join(PATTERNS)}, or N:M to keep N of M neighbours; found {pattern!r}")
    return int(match[1]), int(match[2])
