"""Codebook fitting: one-dimensional k-means, exact by dynamic programming or by Lloyd's iterations."""

from typing import Any

import numpy as np

from quant import kernels
from quant.kernels import array_namespace
from quant.scaling.scales import halves, numbers_of
from quant.types import Array

EXACT = 1 << 12
"""Largest group that is fitted exactly. Larger ones use Lloyd's iterations."""


BATCH = 1 << 15
"""Elements of groups that are fitted at once: their tables fit a core's cache."""


def thresholds(levels: Array) -> Array:
    """Midpoints of neighbouring levels (ties go to the lower level): shape (..., levels - 1)."""
    low, high = levels[..., :-1], levels[..., 1:]
    return (low * np.float32(0.5) + high * np.float32(0.5)).astype(np.float32)


def kmeans_exact(values: np.ndarray, k: int) -> np.ndarray:
    """Optimal k levels (least sum of squared distances): float64, ascending.

    With fewer distinct values, the last one repeats.

    The best clusters of sorted values are intervals. `kernels.optimal_edges` finds them.

    >>> kmeans_exact(np.array([1.0, 2.0, 10.0, 12.0]), 2)
    array([ 1.5, 11. ])
    """
    levels: np.ndarray = fit_groups(np.asarray(values, np.float64)[None], k)[0]
    return levels


def fit_groups(groups: np.ndarray, k: int) -> np.ndarray:
    """Optimal levels of each of several groups of n values, as `kmeans_exact`: shape (groups, n) -> (groups, k)."""
    points = np.sort(groups.astype(np.float64), axis=1)
    exponents = np.frexp(abs(points).max(axis=1, keepdims=True))[1]  # squares neither overflow nor vanish
    points = np.ldexp(points, -exponents)
    numbers = np.cumsum(np.diff(points, axis=1, prepend=points[:, :1]) > 0, axis=1)  # of distinct values, from 0
    levels = np.repeat(points[:, -1:], k, axis=1)
    few = numbers[:, -1] < k
    group, place = np.nonzero(few[:, None] & (numbers < k))
    levels[group, numbers[group, place]] = points[group, place]
    if not few.all():
        levels[~few] = _means(points[~few], kernels.optimal_edges(points[~few], k))
    scaled: np.ndarray = np.ldexp(levels, exponents)
    return scaled


def _means(points: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean of each interval of sorted points, ascending: shape (groups, intervals)."""
    groups, n = points.shape
    counts = np.diff(edges, axis=1)
    lowest = np.take_along_axis(points, edges[:, :-1], axis=1)
    off = points.reshape(-1) - np.repeat(lowest.reshape(-1), counts.reshape(-1))
    starts = edges[:, :-1] + n * np.arange(groups)[:, None]
    means = lowest + np.add.reduceat(off, starts.reshape(-1)).reshape(counts.shape) / counts
    limited: np.ndarray = np.minimum(means, np.take_along_axis(points, edges[:, 1:] - 1, axis=1))
    return limited


def kmeans_lloyd(values: np.ndarray, k: int, iterations: int = 100) -> np.ndarray:
    """k levels by Lloyd's iterations, started from the quantiles: float64, shape (k,), ascending.

    S. Lloyd, "Least squares quantization in PCM" (IEEE Trans. Information Theory, 1982). `values` has shape (n,), n >=
    1. The iteration ends once no level moves.
    """
    points = np.sort(np.asarray(values, np.float64))
    levels = points[(2 * np.arange(k) + 1) * len(points) // (2 * k)]
    for _ in range(iterations):
        edges = np.concatenate([[0], np.searchsorted(points, (levels[1:] + levels[:-1]) / 2, "right"), [len(points)]])
        moved, used = levels.copy(), np.diff(edges) > 0
        moved[used] = _means(points[None], np.append(edges[:-1][used], len(points))[None])[0]
        if (moved == levels).all():
            break
        levels = np.sort(moved)
    return levels


def fit(values: np.ndarray, k: int) -> np.ndarray:
    """Fit k levels to the values: optimal for up to `EXACT` values, by Lloyd's iterations for more."""
    return kmeans_exact(values, k) if len(values) <= EXACT else kmeans_lloyd(values, k)


def fit_into(rows: Array, out: Any) -> None:
    """Fit levels to every group of rows. Put levels and codes in QuantizedArray `out`. ValueError for NaN, infinity."""
    xp, spec, blocks = array_namespace(rows), out.spec, out.layout.blocks
    if not bool(xp.isfinite(rows).all()):
        raise ValueError("x holds NaN or infinity, of which no mean can be taken")
    host = rows if xp is np else rows.get()
    k = 2**spec.bits
    levels = np.empty((blocks.rows, blocks.per_row, k), np.float32)
    whole = blocks.length // blocks.size
    for part, first, size in ((levels[:, :whole], 0, blocks.size), (levels[:, whole:], whole * blocks.size, 0)):
        if part.size:
            groups = host[:, first : first + whole * size] if size else host[:, first:]
            part[...] = _fit_all(groups.reshape(-1, size or groups.shape[1]), k).reshape(part.shape)
    out.put("scale0", xp.asarray(stored_levels(levels, spec.scales.format)))
    codes = xp.empty(out.size, np.uint8)
    ones = xp.ones((blocks.rows, blocks.per_row), np.float32)
    kernels.encode_table(rows, blocks.size, ones, False, thresholds(out.levels()), codes.reshape(rows.shape))
    out.put("codes", codes)


def _fit_all(groups: np.ndarray, k: int) -> np.ndarray:
    """Levels of each row of a matrix, as `fit`: shape (groups, k)."""
    if groups.shape[1] > EXACT:
        return np.array([kmeans_lloyd(group, k) for group in groups])
    step = max(BATCH // groups.shape[1], 1)
    return np.concatenate([fit_groups(groups[at : at + step], k) for at in range(0, len(groups), step)])


def stored_levels(levels: Array, form: str) -> Array:
    """Levels in the format that stores them: float32, or bits of halves. ValueError if one is not finite in it."""
    raw = levels if form == "fp32" else halves(levels, form)
    xp = array_namespace(levels)
    finite = xp.isfinite(numbers_of(raw, form))
    if not bool(finite.all()):
        raise ValueError(f"a level of {float(levels.reshape(-1)[int(xp.argmin(finite))]):.3g} does not fit {form}")
    return raw
