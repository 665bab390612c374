"""Observer of the smallest and largest element, and the base of all observers."""

from __future__ import annotations

from typing import Any

import numpy as np

from quant import kernels
from quant.kernels import array_namespace
from quant.layout import layout
from quant.scaling import scales
from quant.spec.granularity import Granularity, PerChannel, PerTensor, blocking, to_rows
from quant.spec.quant_spec import QuantSpec
from quant.types import Array

TENSOR = PerTensor()


class Ranges:
    """Base of all observers: scale and zero point from a range."""

    granularity: Granularity = TENSOR

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """(lowest, highest) value to be covered: float32, one of each per tensor or channel."""
        raise NotImplementedError

    def parameters(self, spec: QuantSpec) -> dict[str, np.ndarray]:
        """Arguments `scales` and `zeros` for `quantize`. ValueError if nothing was observed.

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
        return {"scales": stored, "zeros": scales.zero_point(spec, stored, bottom)}


def _positive(scale: np.ndarray) -> np.ndarray:
    """Scales with 0 (all elements were 0) replaced by 1."""
    return np.where(scale == 0, np.float32(1), scale)


class MinMax(Ranges):
    """Smallest and largest element of all batches, per tensor or per channel."""

    def __init__(self, granularity: Granularity = TENSOR):
        if not isinstance(granularity, PerTensor | PerChannel):
            raise ValueError(f"granularity: expected per tensor or per channel, found {granularity}")
        self.granularity = granularity
        self.low, self.high = np.empty((2, 0), np.float32)  # no channels before the first batch

    def observe(self, x: Array) -> None:
        """Add a batch. ValueError for NaN, infinity, or a changed number of channels."""
        low, high = batch_range(x, self.granularity)
        if not len(self.low):
            self.low, self.high = low, high
        elif len(low) == len(self.low):
            self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        else:
            raise ValueError(f"x: expected {len(self.low)} channels, as before, found {len(low)}")

    def allreduce(self, comm: Any) -> MinMax:
        """New observer of all ranks' data, the same on all ranks; `comm` has mpi4py's interface."""
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


def batch_range(x: Array, granularity: Granularity) -> tuple[np.ndarray, np.ndarray]:
    """(lowest, highest) element of a batch, per channel: float32 on the host. ValueError for NaN and infinity."""
    blocks = blocking(granularity, tuple(x.shape))
    if not blocks.elements:
        raise ValueError("a batch without elements has no range")
    xp = array_namespace(x)
    rows = xp.ascontiguousarray(to_rows(x.astype(np.float32, copy=False), granularity))
    low, high = kernels.minmax(rows, blocks.size)
    low, high = (bound.reshape(-1) if xp is np else bound.reshape(-1).get() for bound in (low, high))
    if not (np.isfinite(low) & np.isfinite(high)).all():
        raise ValueError("a batch holds NaN or infinity")
    return low, high


def allgather(comm: Any, vector: np.ndarray) -> np.ndarray:
    """Vectors of all ranks as rows: shape (ranks, length)."""
    rows = np.empty((comm.Get_size(), len(vector)), vector.dtype)
    comm.Allgather(vector, rows)
    return rows
