"""Observers that clip rare values, based on a mergeable histogram."""

from __future__ import annotations

from typing import Any

import numpy as np

from quant.observers.histogram import Histogram

CANDIDATES = 256
"""Number of fractions of the whole range that are tried."""


class Percentile(Histogram):
    """Range between percentiles, accurate to a bin: (100 - percentile) / 2 per cent of elements lie beyond each end."""

    def __init__(self, percentile: float = 99.9, bins: int = 2048):
        if not 0 < percentile <= 100:
            raise ValueError(f"percentile: expected above 0 and at most 100, found {percentile}")
        super().__init__(bins)
        self.percentile = percentile

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"percentile": self.percentile}

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        low, high = super().range()
        edges, counts = self.edges(), np.cumsum(self.counts)
        beyond = self.total * (100 - self.percentile) / 200
        lower = edges[np.searchsorted(counts, beyond, "right")]
        upper = edges[np.searchsorted(counts, self.total - beyond, "left") + 1]
        return np.maximum(low, np.float32(lower)), np.minimum(high, np.float32(upper))


class _Best(Histogram):
    """Range with the least loss for codes of `bits` bits, among `CANDIDATES` equally spaced fractions of the whole."""

    def __init__(self, bits: int = 8, symmetric: bool = True, bins: int = 2048):
        if not 2 <= bits <= 8:
            raise ValueError(f"bits: expected 2 to 8, found {bits}")
        super().__init__(bins)
        self.bits, self.symmetric = bits, symmetric

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"bits": self.bits, "symmetric": self.symmetric}

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """(lowest, highest) value to be covered; ties go to the wider range."""
        low, high = (float(bound[0]) for bound in super().range())
        low, high = min(low, 0.0), max(high, 0.0)
        if self.symmetric:
            high = max(-low, high)
            low = -high
        fractions = np.arange(CANDIDATES, 0, -1) / CANDIDATES
        losses = [self._loss(fraction * low, fraction * high) for fraction in fractions]
        best = fractions[int(np.argmin(losses))]
        return np.array([best * low], np.float32), np.array([best * high], np.float32)

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """(middles, counts) of the bins that are not empty."""
        used = np.flatnonzero(self.counts)
        return (self.edges()[used] + self.width / 2), self.counts[used]

    def _codes(self, values: np.ndarray, low: float, high: float) -> tuple[np.ndarray, float]:
        """Code index of each value, from 0, and the step, for codes that cover this range."""
        steps = 2**self.bits - 1 - self.symmetric
        step = (high - low) / steps or 1.0
        return np.clip(np.rint((values - low) / step), 0, steps), step

    def _loss(self, low: float, high: float) -> float:
        raise NotImplementedError


class MeanSquare(_Best):
    """Range with the least mean squared error of rounding and clipping."""

    def _loss(self, low: float, high: float) -> float:
        values, counts = self._places()
        codes, step = self._codes(values, low, high)
        # Within a step rounding costs step^2 / 12 on the average, however many bins there are in it.
        error = (codes * step + low - values) ** 2
        inside = (values >= low) & (values <= high)
        fine = inside & (step <= self.width)
        return float((counts * np.where(fine, step**2 / 12, error)).sum())


class Entropy(_Best):
    """Range with the least Kullback-Leibler divergence between the distribution and its quantised form."""

    def _loss(self, low: float, high: float) -> float:
        values, counts = self._places()
        inside = (values >= low) & (values <= high)
        if not inside.any():
            return np.inf
        codes, _ = self._codes(values[inside], low, high)
        within = counts[inside].astype(np.float64)
        p = within.copy()
        p[0] += counts[values < low].sum()
        p[-1] += counts[values > high].sum()
        index = codes.astype(int)
        q = (np.bincount(index, within) / np.maximum(np.bincount(index), 1))[index]
        p, q = p / p.sum(), q / q.sum()
        return float((p * np.log(p / q)).sum())
