"""Observers of the smallest and largest element, over all batches or as a moving average. The base of all observers."""

from __future__ import annotations

from typing import Any

import numpy as np

from quant import kernels
from quant.formats import as_float32
from quant.kernels import array_namespace
from quant.layout import layout
from quant.scaling import scales
from quant.spec.granularity import Granularity, PerChannel, PerTensor, blocking, to_rows, whole_number
from quant.spec.quant_spec import QuantSpec
from quant.types import Array

TENSOR = PerTensor()


class Ranges:
    """Base of all observers: computes scales and zero points from the range that a subclass observes."""

    granularity: Granularity = TENSOR

    def begin(self, batch: int) -> None:
        """Set the global index of the next batch: no effect except in observers that depend on order (`Ema`)."""

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """(lowest, highest) value that codes are to cover: float32, one of each per tensor or channel."""
        raise NotImplementedError

    def parameters(self, spec: QuantSpec) -> dict[str, np.ndarray]:
        """Arguments `scales`, and `zeros` if asymmetric, for `quantize` by `spec`. ValueError if nothing was observed.

        >>> from quant import INT8, quantize
        >>> observer = MinMax()
        >>> observer.observe(np.array([-1.0, 2.0], np.float32))
        >>> quantize(np.array([1.0, 2.0, 5.0], np.float32), INT8, **observer.parameters(INT8)).dequantize()
        array([1.007874, 2.      , 2.      ], dtype=float32)
        """
        if spec.granularity != self.granularity:
            raise ValueError(f"granularity: expected {self.granularity}, as observed, found {spec.granularity}")
        if spec.code == "kmeans" or spec.q_range == "peak" or spec.scales.parent is not None:
            raise ValueError(f"a range alone does not make scales for {spec}")
        low, high = (bound[:, None] for bound in self.range())
        if spec.symmetric:
            size = np.maximum(abs(low), abs(high)) if spec.signed else np.maximum(high, np.float32(0))
            return {"scales": _positive(scales.symmetric_scale(spec, size))}
        scale, bottom = scales.affine(spec, low, high)
        stored = scales.store(_positive(scale), spec, layout(spec, (len(low), 1)).parent_levels).scales
        # decoding multiplies by the stored scale
        return {"scales": stored, "zeros": scales.zero_point(spec, stored, bottom)}


def _positive(scale: np.ndarray) -> np.ndarray:
    """Scales with 0 (all elements were 0) replaced by 1."""
    return np.where(scale == 0, np.float32(1), scale)


class MinMax(Ranges):
    """Observer of the smallest and largest element of all batches, per tensor or per channel."""

    def __init__(self, granularity: Granularity = TENSOR):
        if not isinstance(granularity, PerTensor | PerChannel):
            raise ValueError(f"granularity: expected per tensor or per channel, found {granularity}")
        self.granularity = granularity
        self.low, self.high = np.empty((2, 0), np.float32)  # no channels before the first batch

    def observe(self, x: Array) -> None:
        """Extend the range by a batch. ValueError for NaN, infinity, no elements, or a changed number of channels."""
        low, high = batch_range(x, self.granularity)
        if not len(self.low):
            self.low, self.high = low, high
        elif len(low) == len(self.low):
            self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        else:
            raise ValueError(f"x: expected {len(self.low)} channels, as before, found {len(low)}")

    def allreduce(self, comm: Any) -> MinMax:
        """New observer with the range of all ranks' batches, the same on all ranks. `comm` has mpi4py's interface."""
        counts = allgather(comm, np.array([len(self.low)], np.int64))[:, 0]
        channels = int(counts.max())
        if any(counts[counts > 0] != channels):
            raise ValueError(f"ranks observed different numbers of channels: {counts.tolist()}")
        merged = MinMax(self.granularity)
        if channels:
            bounds = np.full((2, channels), np.inf, np.float32)
            if len(self.low):
                bounds[:] = self.low, -self.high
            low, high = allgather(comm, bounds.reshape(-1)).min(axis=0).reshape(2, channels)
            merged.low, merged.high = low, -high
        return merged

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        if not len(self.low):
            raise ValueError("no range: nothing was observed yet")
        return self.low, self.high


class Ema(Ranges):
    """Observer of the moving average of the batches' ranges: new = a current + (1 - a) old, 0 < a <= 1.

    Either every rank observes its part of each batch, and the n-th batch of all ranks is one batch. Or `begin` sets
    the global index before each batch, and ranks need not see all of them. The average depends on the order of
    batches, so `batches` has a row (low, -high) for each: float32, infinite if the batch was not observed.
    """

    def __init__(self, a: float = 0.01):
        if not 0 < a <= 1:
            raise ValueError(f"a: expected above 0 and at most 1, found {a}")
        self.a = a
        self.batches = np.empty((0, 2), np.float32)
        self._batch: int | None = None

    def begin(self, batch: int) -> None:
        """Set the global index of the next batch, from 0. ValueError for other numbers."""
        whole_number("batch", batch)
        if batch < 0:
            raise ValueError(f"batch: expected an index from 0, found {batch}")
        self._batch = batch

    def observe(self, x: Array) -> None:
        """Record the range of the next batch, or part of that set by `begin`. ValueError if empty or not finite."""
        low, high = batch_range(x, TENSOR)
        number = len(self.batches) if self._batch is None else self._batch
        self.batches = self._padded(number + 1)
        self.batches[number] = np.minimum(self.batches[number], [low[0], -high[0]])

    def allreduce(self, comm: Any) -> Ema:
        """New observer, the same on all ranks, whose n-th batch consists of the n-th batches of all ranks.

        Collective. ValueError on all ranks if `a` is not the same on all.
        """
        counts, factors = allgather(comm, np.array([len(self.batches), self.a])).T
        if any(factors != factors[0]):
            raise ValueError(f"a: expected the same on all ranks, found {factors.tolist()}")
        batches = int(counts.max())
        merged = Ema(self.a)
        merged.batches = allgather(comm, self._padded(batches).reshape(-1)).min(axis=0).reshape(batches, 2)
        return merged

    def folded(self) -> Ema:
        """New observer with one batch, whose range is the average of all so far, in place of them (none without any).

        Observing goes on with the same averages, up to the rounding of this one to float32, in constant memory.
        """
        folded = Ema(self.a)
        if np.isfinite(self.batches).any():
            low, high = self.range()
            folded.batches = np.array([[low[0], -high[0]]], np.float32)
        return folded

    def _padded(self, batches: int) -> np.ndarray:
        """Copy of `self.batches` with at least `batches` rows. The new ones are marked as not observed (infinite)."""
        return np.pad(self.batches, ((0, max(batches - len(self.batches), 0)), (0, 0)), constant_values=np.inf)

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """(lowest, highest) value, averaged over the observed batches in order: float32, shape (1,) each."""
        observed = self.batches[np.isfinite(self.batches[:, 0])]
        if not len(observed):
            raise ValueError("no range: nothing was observed yet")
        average = observed[0].astype(np.float64)
        for bounds in observed[1:]:
            average = self.a * bounds + (1 - self.a) * average
        return average[:1].astype(np.float32), -average[1:].astype(np.float32)


def batch_range(x: Array, granularity: Granularity) -> tuple[np.ndarray, np.ndarray]:
    """(lowest, highest) element of a batch, per tensor or channel: float32, host. ValueError if empty or not finite.

    TypeError for numbers that are not real.
    """
    blocks = blocking(granularity, tuple(x.shape))
    if not blocks.elements:
        raise ValueError("a batch without elements has no range")
    if x.dtype.kind not in "fiub" and x.dtype.name != "bfloat16":
        raise TypeError(f"x: expected real numbers, found {x.dtype}")
    xp = array_namespace(x)
    rows = xp.ascontiguousarray(to_rows(as_float32("x", x), granularity))
    low, high = kernels.minmax(rows, blocks.size)
    low, high = (bound.reshape(-1) if xp is np else bound.reshape(-1).get() for bound in (low, high))
    if not (np.isfinite(low) & np.isfinite(high)).all():
        raise ValueError("a batch holds NaN or infinity")
    return low, high


def allgather(comm: Any, vector: np.ndarray) -> np.ndarray:
    """Vectors of all ranks, of equal lengths, as rows: shape (ranks, length). Collective."""
    rows = np.empty((comm.Get_size(), len(vector)), vector.dtype)
    comm.Allgather(vector, rows)
    return rows
