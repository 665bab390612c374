"""Codecs of rows on their way between ranks: a few bits per element, with the error that they make predicted."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import numpy as np

from collectives.compressed.codec import QuantCodec
from parallel.nn import kernels
from quant.formats import values
from quant.spec.granularity import PerGroup
from quant.spec.presets import grouped
from quant.types import Array

SPECS = {"int8": grouped(8, 128, "fp32"), "fp8": grouped(8, 128, "fp32", code="e4m3")}
"""Number formats by name: 8 bits, and a scale per 128 elements (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""


class RowCodec:
    """Encoding of rows by a format of `SPECS`. Rows are encoded as float32; NaN and infinite ones become NaN."""

    def __init__(self, name: str):
        self.name, self._codec = name, QuantCodec(SPECS[name])

    def nbytes(self, count: int) -> int:
        """Bytes of `count` encoded elements."""
        return self._codec.nbytes(count) if count else 0

    def encode(self, rows: Array, wire: Array) -> None:
        """Encode rows into the bytes `wire`."""
        if rows.size:
            self._codec.encode(kernels.widen(rows).reshape(-1).astype(np.float32, copy=False), wire)

    def decode(self, wire: Array, rows: Array) -> None:
        """Decode the bytes `wire` into the rows, C-contiguous."""
        if rows.dtype == np.float32 and rows.size:
            self._codec.decode(wire, rows.reshape(-1))
        elif rows.size:
            values = kernels.array_namespace(wire).empty(rows.shape, np.float32)
            self._codec.decode(wire, values.reshape(-1))
            kernels.narrow(values, rows.dtype, rows)


@cache
def predicted_error(name: str) -> float:
    """Predicted error of a format, relative to the size of the rows (root mean squares), for normal random numbers.

    The largest number of a group is taken as the median of the largest of so many; errors are averaged over the normal
    density, to half the distance of neighbouring codes.

    >>> round(predicted_error("int8"), 4), round(predicted_error("fp8"), 4)
    (0.0065, 0.0266)
    """
    spec = SPECS[name]
    assert isinstance(spec.granularity, PerGroup)
    inside = 0.5 ** (1 / spec.granularity.size)  # probability of one number, so that of all is one half
    largest = NormalDist().inv_cdf((1 + inside) / 2)
    codes = np.arange(-127, 128) if spec.code == "linear" else values(spec.code)
    levels = np.unique(codes[np.isfinite(codes)]) * (largest / np.nanmax(codes))
    x = np.linspace(-largest, largest, 200_001)
    above = np.clip(np.searchsorted(levels, x), 1, len(levels) - 1)
    errors = np.minimum(abs(x - levels[above - 1]), abs(x - levels[above]))
    density = np.exp(-(x**2) / 2)
    return float(np.sqrt((errors**2 * density).sum() / (x**2 * density).sum()))
