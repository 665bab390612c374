"""Mergeable histogram of fixed size, independent of the order of observation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from quant.kernels import array_namespace
from quant.observers.ranges import Ranges, batch_range, everywhere
from quant.spec.granularity import PerTensor
from quant.types import Array

LEAST = -149
"""log2 of the narrowest bins: the smallest positive float32."""


class Histogram(Ranges):
    """Histogram with equal bins on either side of 0; the bin width doubles when an element lies beyond them.

    Bin i holds elements from i w to below (i + 1) w, for i from -bins/2 on, and w is a power of two: the smallest with
    which the largest |x| so far has a bin. Two neighbouring bins are one of those twice as wide. So the counts follow
    from the set of elements alone, and those of several observers, brought to the same width, add up.

    Parameters
    ----------
    bins : int
        Even.

    Attributes
    ----------
    counts : array of int64, shape (bins,)
    exponent : int
        log2 of the width.
    low, high : float
        The least and the largest element; infinite while there are none.

    Examples
    --------
    >>> seen = Histogram(4)
    >>> seen.observe(np.array([0.5, -0.5, 1.0, 3.0], np.float32))
    >>> seen.width, seen.counts
    (2.0, array([0, 1, 2, 1]))
    """

    def __init__(self, bins: int = 2048):
        if bins < 2 or bins % 2:
            raise ValueError(f"bins are an even number, not {bins}")
        self.counts = np.zeros(bins, np.int64)
        self.exponent = LEAST
        self.low, self.high = math.inf, -math.inf

    @property
    def width(self) -> float:
        """Bin width."""
        return math.ldexp(1.0, self.exponent)

    @property
    def total(self) -> int:
        """Number of elements."""
        return int(self.counts.sum())

    def edges(self) -> np.ndarray:
        """Bin edges: float64, shape (bins + 1,)."""
        half = len(self.counts) // 2
        return np.arange(-half, half + 1) * self.width

    def observe(self, x: Array) -> None:
        """Add a batch. ValueError for NaN and infinity."""
        low, high = (float(bound[0]) for bound in batch_range(x, PerTensor()))
        self._widen(max(self.exponent, self._needed(low, high)))
        self.low, self.high = min(self.low, low), max(self.high, high)
        xp = array_namespace(x)
        half = len(self.counts) // 2
        # A float64 holds a float32 over a power of two exactly; fewer than 2^16 elements at a time stay in the cache.
        flat = x.reshape(-1)
        for first in range(0, flat.size, 1 << 16):
            part = flat[first : first + (1 << 16)].astype(np.float64) * 2.0**-self.exponent
            found = xp.bincount((xp.floor(part) + half).astype(np.int64), minlength=len(self.counts))
            self.counts += found if xp is np else found.get()

    def _needed(self, low: float, high: float) -> int:
        """Smallest exponent at which both values have bins."""
        half, exponent = len(self.counts) // 2, LEAST
        largest = max(-low, high)
        if largest > 0:
            exponent = max(math.frexp(largest)[1] - half.bit_length(), LEAST)
            while high >= math.ldexp(half, exponent) or low < -math.ldexp(half, exponent):
                exponent += 1
        return exponent

    def _widen(self, exponent: int) -> None:
        """Merge bins to width 2^exponent, at least the current width."""
        half, shift = len(self.counts) // 2, exponent - self.exponent
        if shift > 0 and self.counts.any():
            places = (np.arange(len(self.counts)) - half) >> min(shift, 62)
            self.counts = np.bincount(places + half, self.counts, len(self.counts)).astype(np.int64)
        self.exponent = exponent

    def merge(self, other: Histogram) -> Histogram:
        """New histogram of both data sets."""
        if len(other.counts) != len(self.counts):
            raise ValueError(f"histograms of {len(self.counts)} and {len(other.counts)} bins do not add up")
        made = type(self)(**self._settings())
        for one in (self, other):
            exponent = max(made.exponent, one.exponent)
            made._widen(exponent)
            made.counts += one._at(exponent)
            made.low, made.high = min(made.low, one.low), max(made.high, one.high)
        return made

    def allreduce(self, comm: Any) -> Histogram:
        """New histogram of all ranks' data, the same on all ranks; `comm` has mpi4py's interface."""
        mine = np.array([len(self.counts), self.exponent, -self.low, self.high])
        bins, exponents, lows, highs = everywhere(comm, mine).T
        if any(bins != len(self.counts)):
            raise ValueError(f"histograms of different numbers of bins do not add up: {sorted(set(bins.astype(int)))}")
        made = type(self)(**self._settings())
        made.exponent, made.low, made.high = int(exponents.max()), float(-lows.max()), float(highs.max())
        comm.Allreduce(self._at(made.exponent), made.counts)  # the sum, as is mpi4py's default
        return made

    def _at(self, exponent: int) -> np.ndarray:
        """Counts in wider bins."""
        copy = Histogram(len(self.counts))
        copy.counts, copy.exponent = self.counts.copy(), self.exponent
        copy._widen(exponent)
        return copy.counts

    def _settings(self) -> dict[str, Any]:
        """Constructor arguments of an equal observer."""
        return {"bins": len(self.counts)}

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        if not self.total:
            raise ValueError("nothing was seen yet")
        return np.array([self.low], np.float32), np.array([self.high], np.float32)
