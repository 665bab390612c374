"""Formats of rows on their way between ranks: a few bits per element, with the error that they make predicted."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import numpy as np

from parallel.nn import kernels
from quant import RowFormat
from quant.formats import values
from quant.spec.granularity import PerGroup
from quant.spec.presets import grouped
from quant.types import Array

SPECS = {
    "int8": grouped(8, 128, "fp32").replace(divisor="inverse"),
    "fp8": grouped(8, 128, "fp32", code="e4m3").replace(divisor="inverse"),
}
"""Number formats by name: 8 bits, and a scale per 128 elements of a row (DeepSeek-V3, arXiv:2412.19437, 3.3.2).

Elements are multiplied by the inverse of the scale: faster than division.
"""


class RowCodec:
    """Format of rows in messages: `quant.RowFormat`, or none.

    Rows are encoded as float32.

    Parameters
    ----------
    name : str
        Key of `SPECS`. "": rows stay as they are.
    width : int
        Elements of a row.
    dtype : dtype
        Of rows before and after.
    """

    def __init__(self, name: str, width: int, dtype: np.dtype):
        self.name, self.width, self.dtype = name, width, dtype
        self._format = RowFormat(SPECS[name], width) if name else None

    @property
    def nbytes(self) -> int:
        """Bytes of a row on its way."""
        return self._format.nbytes if self._format else self.width * self.dtype.itemsize

    def encode(self, rows: Array, out: Array | None = None) -> Array:
        """Encode rows (n, width). Returns bytes (n, nbytes), perhaps `out`, or without a format `rows`."""
        if self._format is None:
            return rows
        xp = kernels.array_namespace(rows)
        out = xp.empty((len(rows), self.nbytes), np.uint8) if out is None else out
        self._format.encode(xp.ascontiguousarray(kernels.widen(rows).astype(np.float32, copy=False)), out)
        return out

    def decode(self, wire: Array) -> Array:
        """Decode rows of bytes to rows of the dtype. Without a format, returns `wire`."""
        if self._format is None:
            return wire
        rows = kernels.array_namespace(wire).empty((len(wire), self.width), np.float32)
        return kernels.narrow(self._format.decode(wire, rows), self.dtype)

    def scale(self, wire: Array, factors: Array) -> None:
        """Multiply encoded rows by factors (n, 1), in place, as their scales."""
        assert self._format is not None
        scales = self._format.scales(wire)
        scales *= factors

    def add(self, y: Array, tokens: Array, wire: Array, weights: Array | None = None) -> None:
        """Add encoded rows, perhaps times weights (n, 1), to the rows `tokens` of y. y is wide."""
        if self._format is None:
            kernels.add_rows(y, tokens, kernels.widen(wire), weights)
        else:
            self._format.add(wire, y, tokens, weights)

    def products(self, upper: Array, tokens: Array, wire: Array) -> Array:
        """Sums (n,) of the rows `tokens` of `upper` (wide) times encoded rows."""
        if self._format is None:
            return kernels.row_products(upper, tokens, kernels.widen(wire))
        return self._format.products(wire, upper, tokens)


@cache
def predicted_error(name: str) -> float:
    """Predicted error of a format, relative to the size of the rows (root mean squares), for normal random numbers.

    The largest magnitude of a group is taken as its median over random groups. Errors are averaged over the normal
    density, to half the distance of neighbouring codes.

    >>> round(predicted_error("int8"), 4), round(predicted_error("fp8"), 4)
    (0.0065, 0.0266)
    """
    spec = SPECS[name]
    assert isinstance(spec.granularity, PerGroup)
    inside = 0.5 ** (1 / spec.granularity.size)  # of one number, so that the probability of all is one half
    largest = NormalDist().inv_cdf((1 + inside) / 2)
    codes = np.arange(-127, 128) if spec.code == "linear" else values(spec.code)
    levels = np.unique(codes[np.isfinite(codes)]) * (largest / np.nanmax(codes))
    x = np.linspace(-largest, largest, 200_001)
    above = np.clip(np.searchsorted(levels, x), 1, len(levels) - 1)
    errors = np.minimum(abs(x - levels[above - 1]), abs(x - levels[above]))
    density = np.exp(-(x**2) / 2)
    return float(np.sqrt((errors**2 * density).sum() / (x**2 * density).sum()))
