"""Codebook fitting: one-dimensional k-means, exact by dynamic programming or by Lloyd's iterations."""

from typing import Any

import numpy as np

from quant import kernels
from quant.kernels import array_namespace
from quant.scaling.scales import halves, numbers_of
from quant.types import Array

EXACT = 1 << 12
"""Largest group that is fitted exactly; larger ones use Lloyd's iterations."""


BATCH = 1 << 15
"""Elements of groups that are fitted at once: their tables fit a core's cache."""


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
        levels[~few] = _means(points[~few], _optimal_edges(points[~few], k))
    scaled: np.ndarray = np.ldexp(levels, exponents)
    return scaled


class IntervalCosts:
    """Sum of squared distances to the mean for intervals of sorted values, without cancellation.

    Level l of the tables divides the places in blocks of 2^l; place i has mean and squares of the values between it and
    the middle of its block. An interval joins two of these at the level where its ends are in different halves of a
    block (T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
    1979). Squares are taken about the value at the middle, one of those summed, so they are at most the number of
    values times the result: no value outside an interval, as an outlier, has a share in its rounding errors.
    """

    def __init__(self, points: np.ndarray):
        groups, n = points.shape
        height = max(n - 1, 1).bit_length()
        self._width = 1 << height
        padded = np.pad(points, ((0, 0), (0, self._width - n)), mode="edge")
        means, squares = np.empty((2, height + 1, groups, self._width))
        means[0], squares[0] = padded, 0
        for level in range(1, height + 1):
            half = 1 << (level - 1)
            shape = groups, -1, 2, half
            halves_of = (array.reshape(shape) for array in (padded, means[level], squares[level]))
            values, mean, square = ((array[:, :, 0, ::-1], array[:, :, 1]) for array in halves_of)
            for side in range(2):
                off = values[side] - values[side][..., :1]
                shift = np.cumsum(off, axis=-1) / np.arange(1, half + 1)
                mean[side][...] = values[side][..., :1] + shift
                square[side][...] = np.cumsum(off * off, axis=-1) - shift * shift * np.arange(1, half + 1)
        self._means, self._squares = means.reshape(-1), np.maximum(squares, 0).reshape(-1)
        self._size = groups * self._width

    def __call__(self, group: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Cost of the values `first` to `end` (exclusive) of each group."""
        last = end - 1
        level = np.frexp(first ^ last)[1]
        middle = (last >> np.maximum(level - 1, 0)) << np.maximum(level - 1, 0)
        start = level * self._size + group * self._width
        one, other = start + first, start + last
        apart = self._means[other] - self._means[one]
        costs: np.ndarray = self._squares[one] + self._squares[other]
        costs += apart * apart * ((middle - first) * (end - middle) / (end - first))
        return costs


def _optimal_edges(points: np.ndarray, k: int) -> np.ndarray:
    """Edges of the k best intervals of each row of sorted points: shape (groups, k + 1)."""
    groups, n = points.shape
    cost, every = IntervalCosts(points), np.arange(groups)
    least = np.full((groups, n + 1), np.inf)
    least[:, 1:] = cost(every[:, None], np.zeros((1, n), int), np.arange(1, n + 1)[None])
    starts = []
    for clusters in range(2, k + 1):
        least, start = _next_row(least, cost, clusters, n - (k - clusters))
        starts.append(start)
    edges = np.empty((groups, k + 1), int)
    edges[:, 0], edges[:, k] = 0, n
    for clusters in range(k, 1, -1):
        edges[:, clusters - 1] = starts[clusters - 2][every, edges[:, clusters]]
    return edges


def _next_row(least: np.ndarray, cost: IntervalCosts, clusters: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(least cost of the first i values in `clusters` clusters, start of the last), by group, for i up to `most`."""
    row, start = np.full_like(least, np.inf), np.zeros(least.shape, np.int32)
    group = np.arange(len(least))
    # Ends low..high, whose best starts are in first..last, for each group.
    low, high, first, last = (np.full(len(group), bound) for bound in (clusters, most, clusters - 1, most - 1))
    while len(group):
        end = (low + high) // 2
        counts = np.minimum(last, end - 1) - first + 1
        offsets = np.cumsum(counts) - counts
        span = np.repeat(np.arange(len(group)), counts)
        candidates = np.arange(len(span)) - (offsets - first)[span]
        totals = least[group[span], candidates] + cost(group[span], candidates, end[span])
        best = np.minimum.reduceat(totals, offsets)
        where = np.flatnonzero(totals == best[span])
        chosen = candidates[where[np.searchsorted(where, offsets)]]
        row[group, end], start[group, end] = best, chosen
        below, above = low < end, end < high
        low, high, first, last = (
            np.concatenate([one[below], other[above]])
            for one, other in ((low, end + 1), (end - 1, high), (first, chosen), (chosen, last))
        )
        group = np.concatenate([group[below], group[above]])
    return row, start


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
    1; the iteration ends once no level moves.
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
    """Fit levels to every group of rows; put levels and codes in QuantizedArray `out`. ValueError for NaN, infinity."""
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
