"""Codebook fitting: one-dimensional k-means, exact by dynamic programming or by Lloyd's iterations."""

from typing import Any

import numpy as np

from quant import kernels
from quant.kernels import array_namespace
from quant.scaling.scales import halves, numbers_of
from quant.types import Array

EXACT = 1 << 12
"""Largest group that is fitted exactly; larger ones use Lloyd's iterations."""


def thresholds(levels: Array) -> Array:
    """Midpoints of neighbouring levels (ties go to the lower level): shape (..., levels - 1)."""
    low, high = levels[..., :-1], levels[..., 1:]
    return (low * np.float32(0.5) + high * np.float32(0.5)).astype(np.float32)


def kmeans_exact(values: np.ndarray, k: int) -> np.ndarray:
    """Optimal k levels (least sum of squared distances): float64, ascending; of fewer distinct values the last repeats.

    The best clusters of sorted values are intervals. With D[j][i] the least cost of the first i values in j intervals,
    the best start of the last interval does not move left as i grows, so D[j] follows from D[j-1] by divide and conquer
    in n log n steps, here one recursion depth at a time. H. Wang and M. Song, "Ckmeans.1d.dp" (The R Journal, 2011);
    monotone starts: X. Wu, "Optimal quantization by matrix searching" (J. Algorithms, 1991).

    >>> kmeans_exact(np.array([1.0, 2.0, 10.0, 12.0]), 2)
    array([ 1.5, 11. ])
    """
    points, mass = np.unique(np.asarray(values, np.float64), return_counts=True)
    if len(points) <= k:
        return np.concatenate([points, np.full(k - len(points), points[-1])])
    middle = points.mean()  # sums of squares lose less about the middle
    prefix = [np.concatenate([[0.0], np.cumsum(mass * (points - middle) ** power)]) for power in range(3)]

    def cost(first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Sum of squared distances to the mean of the sorted points `first` to `last` (exclusive)."""
        count, total, squares = (sums[last] - sums[first] for sums in prefix)
        costs: np.ndarray = np.maximum(squares - total * total / count, 0)
        return costs

    n = len(points)
    ends = np.arange(n + 1)
    least = np.full(n + 1, np.inf)
    least[1:] = cost(np.zeros(n, int), ends[1:])
    starts = []
    for clusters in range(2, k + 1):
        least, start = _next_row(least, cost, clusters, n)
        starts.append(start)
    edges = [n]
    for start in reversed(starts):
        edges.append(int(start[edges[-1]]))
    edges.append(0)
    bounds = np.array(edges[::-1])
    count, total = (sums[bounds[1:]] - sums[bounds[:-1]] for sums in prefix[:2])
    means: np.ndarray = total / count + middle
    return means


def _next_row(least: np.ndarray, cost: Any, clusters: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(least cost of the first i points in `clusters` clusters, start of the last one), for all i up to n."""
    row, start = np.full(n + 1, np.inf), np.zeros(n + 1, int)
    spans = [(clusters, n, clusters - 1, n - 1)]  # ends low..high, whose best starts are in first..last
    while spans:
        below = []
        middles = np.array([(low + high) // 2 for low, high, _, _ in spans])
        firsts = np.array([span[2] for span in spans])
        lasts = np.minimum([span[3] for span in spans], middles - 1)
        counts = lasts - firsts + 1
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
        candidates = np.arange(counts.sum()) - np.repeat(offsets - firsts, counts)
        totals = least[candidates] + cost(candidates, np.repeat(middles, counts))
        best = np.minimum.reduceat(totals, offsets)
        where = np.flatnonzero(totals == np.repeat(best, counts))
        chosen = candidates[where[np.searchsorted(where, offsets)]]
        row[middles], start[middles] = best, chosen
        for (low, high, first, last), middle, pick in zip(spans, middles, chosen):
            below += [(low, middle - 1, first, int(pick))] if low < middle else []
            below += [(middle + 1, high, int(pick), last)] if middle < high else []
        spans = below
    return row, start


def kmeans_lloyd(values: np.ndarray, k: int, iterations: int = 100) -> np.ndarray:
    """k levels by Lloyd's iterations, started from the quantiles: float64, shape (k,), ascending.

    S. Lloyd, "Least squares quantization in PCM" (IEEE Trans. Information Theory, 1982). `values` has shape (n,), n >=
    1; the iteration ends once no level moves.
    """
    points = np.sort(np.asarray(values, np.float64))
    sums = np.concatenate([[0.0], np.cumsum(points)])
    levels = points[(2 * np.arange(k) + 1) * len(points) // (2 * k)]
    for _ in range(iterations):
        edges = np.concatenate([[0], np.searchsorted(points, (levels[1:] + levels[:-1]) / 2, "right"), [len(points)]])
        count = np.diff(edges)
        moved = np.where(count > 0, np.diff(sums[edges]) / np.maximum(count, 1), levels)
        if (moved == levels).all():
            break
        levels = np.sort(moved)
    return levels


def fit(values: np.ndarray, k: int) -> np.ndarray:
    """Fit k levels to the values: optimal for up to `EXACT` values, by Lloyd's iterations for more."""
    return kmeans_exact(values, k) if len(values) <= EXACT else kmeans_lloyd(values, k)


def fit_into(rows: Array, out: Any) -> None:
    """Fit levels to every group of rows; put levels and codes in QuantizedArray `out`. ValueError for NaN, infinity."""
    xp, spec, blocks = array_namespace(rows), out.spec, out.layout.blocks
    if not bool(xp.isfinite(rows).all()):
        raise ValueError("x holds NaN or infinity, of which no mean can be taken")
    host = rows if xp is np else rows.get()
    k = 2**spec.bits
    levels = np.empty((blocks.rows, blocks.per_row, k), np.float32)
    for row in range(blocks.rows):
        for group in range(blocks.per_row):
            levels[row, group] = fit(host[row, group * blocks.size : (group + 1) * blocks.size], k)
    form = spec.scales.format
    raw = levels if form == "fp32" else halves(levels, form)
    if not np.isfinite(numbers_of(raw, form)).all():
        raise ValueError(f"a level does not fit {form}")
    out.put("scale0", xp.asarray(raw))
    codes = xp.empty(out.size, np.uint8)
    ones = xp.ones((blocks.rows, blocks.per_row), np.float32)
    kernels.encode_table(rows, blocks.size, ones, False, thresholds(out.levels()), codes.reshape(rows.shape))
    out.put("codes", codes)
