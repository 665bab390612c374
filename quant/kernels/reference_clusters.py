"""Reference of k-means in one dimension: the best intervals of sorted values, by dynamic programming."""

import numpy as np


class IntervalCosts:
    """Sum of squared distances to the mean for intervals of sorted values, without cancellation.

    Level l of the tables divides the places in blocks of 2^l. Place i has mean and squares of the values between it
    and the middle of its block. An interval joins two of these at the level where its ends are in different halves of
    a block (T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979). Squares are taken about the value at the middle, one of those summed, so they are at most the
    number of values times the result: no value outside an interval, such as an outlier, affects its rounding errors.
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


def optimal_edges(points: np.ndarray, k: int) -> np.ndarray:
    """Edges of the k intervals of least cost of each row of sorted points: shape (groups, k + 1), int64.

    The cost of an interval is the sum of squared distances to its mean. With D[j][i] the least cost of the first i
    values in j intervals, the best start of the last interval does not move left as i grows, so D[j] follows from
    D[j-1] by divide and conquer in n log n steps. The loop does one recursion depth at a time. A row has at least k
    values. H. Wang and M. Song, "Ckmeans.1d.dp" (The R Journal, 2011). Monotone starts: X. Wu, "Optimal quantization
    by matrix searching" (J. Algorithms, 1991).
    """
    groups, n = points.shape
    cost, every = IntervalCosts(points), np.arange(groups)
    least = np.full((groups, n + 1), np.inf)
    least[:, 1:] = cost(every[:, None], np.zeros((1, n), int), np.arange(1, n + 1)[None])
    starts = []
    for clusters in range(2, k + 1):
        least, start = _next_row(least, cost, clusters, n - (k - clusters))
        starts.append(start)
    edges = np.empty((groups, k + 1), np.int64)
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
