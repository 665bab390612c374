"""Mergeable histogram of fixed size, independent of the order of observation, and ranges that clip rare values."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import numpy as np

from quant.formats import as_float32
from quant.kernels import array_namespace
from quant.observers.ranges import Ranges, allgather, batch_range
from quant.spec.granularity import PerTensor
from quant.types import Array

LEAST = -149
"""log2 of the narrowest bins: the smallest positive float32."""

CANDIDATES = 256
"""Number of fractions of the whole range that are tried."""


class Histogram(Ranges):
    """Histogram with equal numbers of bins above and below 0. The bin width doubles when an element lies outside.

    Bin i holds elements from i w to below (i + 1) w, for i from -bins/2 on. The width w is the smallest power of two
    with which the largest |x| so far has a bin. Merging two neighbouring bins gives one of twice the width, so the
    counts follow from the set of elements alone, and the counts of several observers, brought to the same width, add
    up.

    `bins` is even. `counts` is int64, `exponent` log2 of the width. `low` and `high` are the least and the largest
    element, infinite before the first.

    >>> histogram = Histogram(4)
    >>> histogram.observe(np.array([0.5, -0.5, 1.0, 3.0], np.float32))
    >>> histogram.width, histogram.counts
    (2.0, array([0, 1, 2, 1]))
    """

    def __init__(self, bins: int = 2048):
        if bins < 2 or bins % 2:
            raise ValueError(f"bins: expected an even number, found {bins}")
        self.counts = np.zeros(bins, np.int64)
        self.exponent = LEAST
        self.low, self.high = math.inf, -math.inf

    @property
    def width(self) -> float:
        """Bin width."""
        return math.ldexp(1.0, self.exponent)

    @property
    def total(self) -> int:
        """Number of elements observed."""
        return int(self.counts.sum())

    def edges(self) -> np.ndarray:
        """Bin edges: float64, shape (bins + 1,)."""
        half = len(self.counts) // 2
        return np.arange(-half, half + 1) * self.width

    def observe(self, x: Array) -> None:
        """Count the elements of a batch of any shape, as float32. ValueError for NaN, infinity, or an empty batch."""
        x = as_float32("x", x)
        low, high = (float(bound[0]) for bound in batch_range(x, PerTensor()))
        exponent = max(self.exponent, self._needed(low, high))
        self.counts, self.exponent = self._counts_at(exponent), exponent
        self.low, self.high = min(self.low, low), max(self.high, high)
        xp = array_namespace(x)
        half = len(self.counts) // 2
        # A float64 holds a float32 over a power of two exactly. Fewer than 2^16 elements at a time stay in the cache.
        flat = x.reshape(-1)
        for first in range(0, flat.size, 1 << 16):
            part = flat[first : first + (1 << 16)].astype(np.float64) * 2.0**-self.exponent
            found = xp.bincount((xp.floor(part) + half).astype(np.int64), minlength=len(self.counts))
            self.counts += found if xp is np else found.get()

    def _needed(self, low: float, high: float) -> int:
        """Smallest log2 of the bin width with which both values have a bin."""
        half, exponent = len(self.counts) // 2, LEAST
        largest = max(-low, high)
        if largest > 0:
            exponent = max(math.frexp(largest)[1] - half.bit_length(), LEAST)
            while high >= math.ldexp(half, exponent) or low < -math.ldexp(half, exponent):
                exponent += 1
        return exponent

    def _counts_at(self, exponent: int) -> np.ndarray:
        """Counts in bins of width 2^exponent, merged from the current bins (not wider): shape (bins,)."""
        half, shift = len(self.counts) // 2, exponent - self.exponent
        if not shift:
            return self.counts
        places = (np.arange(len(self.counts)) - half) >> min(shift, 62)
        return np.bincount(places + half, self.counts, len(self.counts)).astype(np.int64)

    def allreduce(self, comm: Any) -> Histogram:
        """New histogram of all ranks' elements, the same on all, with the options of this one (such as a percentile).

        Collective. ValueError on all ranks if numbers of bins differ.
        """
        mine = np.array([len(self.counts), self.exponent, -self.low, self.high])
        bins, exponents, lows, highs = allgather(comm, mine).T
        if any(bins != len(self.counts)):
            raise ValueError(f"histograms of different numbers of bins do not add up: {sorted(set(bins.astype(int)))}")
        merged = copy(self)
        merged.counts = np.empty_like(self.counts)
        merged.exponent, merged.low, merged.high = int(exponents.max()), float(-lows.max()), float(highs.max())
        comm.Allreduce(self._counts_at(merged.exponent), merged.counts)  # the sum, as is mpi4py's default
        return merged

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        if not self.total:
            raise ValueError("no range: nothing was observed yet")
        return np.array([self.low], np.float32), np.array([self.high], np.float32)


class Percentile(Histogram):
    """Observer of the range between percentiles: (100 - percentile) / 2 per cent of elements lie beyond each end.

    Accurate to the width of a bin.
    """

    def __init__(self, percentile: float = 99.9, bins: int = 2048):
        if not 0 < percentile <= 100:
            raise ValueError(f"percentile: expected above 0 and at most 100, found {percentile}")
        super().__init__(bins)
        self.percentile = percentile

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        low, high = super().range()
        edges, counts = self.edges(), np.cumsum(self.counts)
        beyond = self.total * (100 - self.percentile) / 200
        lower = edges[np.searchsorted(counts, beyond, "right")]
        upper = edges[np.searchsorted(counts, self.total - beyond, "left") + 1]
        return np.maximum(low, np.float32(lower)), np.minimum(high, np.float32(upper))


class _LeastLoss(Histogram):
    """Base of observers that try `CANDIDATES` fractions of the full range and take that with the least loss."""

    def __init__(self, bits: int = 8, symmetric: bool = True, bins: int = 2048):
        if not 2 <= bits <= 8:
            raise ValueError(f"bits: expected 2 to 8, found {bits}")
        super().__init__(bins)
        self.bits, self.symmetric = bits, symmetric

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """(lowest, highest) value of the range of least loss: float32, shape (1,) each. The widest of equal ones."""
        low, high = (float(bound[0]) for bound in super().range())
        low, high = min(low, 0.0), max(high, 0.0)
        if self.symmetric:
            high = max(-low, high)
            low = -high
        middles = self.edges()[:-1] + self.width / 2
        fractions = np.arange(CANDIDATES, 0, -1) / CANDIDATES
        losses = [self._loss(middles, fraction * low, fraction * high) for fraction in fractions]
        best = fractions[int(np.argmin(losses))]
        return np.array([best * low], np.float32), np.array([best * high], np.float32)

    def _codes(self, values: np.ndarray, low: float, high: float) -> tuple[np.ndarray, float]:
        """(code of each value, from 0, and the step) of uniform quantisation of the range from `low` to `high`."""
        steps = 2**self.bits - 1 - self.symmetric
        step = (high - low) / steps or 1.0
        return np.clip(np.rint((values - low) / step), 0, steps), step

    def _loss(self, middles: np.ndarray, low: float, high: float) -> float:
        """Loss of codes that cover `low` to `high`. `middles`: the middle of every bin."""
        raise NotImplementedError


class MeanSquare(_LeastLoss):
    """Observer that chooses the range with the least mean squared error of rounding and clipping."""

    def _loss(self, middles: np.ndarray, low: float, high: float) -> float:
        used = self.counts > 0
        values, counts = middles[used], self.counts[used]
        codes, step = self._codes(values, low, high)
        # Within a step rounding costs step^2 / 12 on the average, however many bins there are in it.
        fine = (values >= low) & (values <= high) & (step <= self.width)
        return float((counts * np.where(fine, step**2 / 12, (codes * step + low - values) ** 2)).sum())


class Entropy(_LeastLoss):
    """Observer that chooses the range of least Kullback-Leibler divergence between the distribution and its codes'.

    The rule is TensorRT's: a range has at least as many bins as there are codes, and its outermost bins also count the
    elements beyond them, in the distribution alone (Migacz, "8-bit Inference with TensorRT", GTC 2017). In an
    outermost bin with no other elements the codes' distribution counts one. Otherwise the divergence would be
    infinite. It is infinite for a range without elements.

    The codes' distribution is a share of all elements, so a range of divergence D holds a share of at least e^-D.
    TensorRT takes the share of the elements in the range: where data stay away from 0, a range with a single bin of
    them would have divergence 0.
    """

    def _loss(self, middles: np.ndarray, low: float, high: float) -> float:
        if high - low < (2**self.bits - self.symmetric) * self.width:
            return math.inf
        first, last = (math.floor(bound / self.width) + len(self.counts) // 2 for bound in (low, high))
        inside = self.counts[first : last + 1]
        if not inside.any():
            return math.inf
        p = inside.astype(np.float64)
        p[0] += self.counts[:first].sum()
        p[-1] += self.counts[last + 1 :].sum()
        codes = self._codes(middles[first : last + 1], low, high)[0].astype(int)
        means = np.bincount(codes, inside) / np.maximum(np.bincount(codes, inside > 0), 1)
        q = np.where(inside > 0, means[codes], 1.0)[p > 0]
        p = p[p > 0]
        return float((p * np.log(p / q)).sum()) / self.total
