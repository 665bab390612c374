"""Rows of bytes, each quantised independently. They can be taken, joined and sent like other rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quant import kernels
from quant.array import writable
from quant.formats import values
from quant.kernels import LinearCode, array_namespace
from quant.quantize import quantize, quantize_in_one_pass
from quant.spec.granularity import PerGroup
from quant.spec.quant_spec import QuantSpec
from quant.types import Array


@dataclass(frozen=True)
class RowFormat:
    """Format of rows of `width` float32 numbers: scales of the groups, a byte for each number, and zeros.

    The zeros fill up a multiple of four bytes.

    Parameters
    ----------
    spec : QuantSpec
        Symmetric, of 8 bits, with a float32 scale per group. Others raise ValueError.
    width : int

    Examples
    --------
    >>> from quant import grouped
    >>> rows = RowFormat(grouped(8, 128, "fp32"), 130)
    >>> rows.nbytes
    140
    >>> wire = np.empty((2, rows.nbytes), np.uint8)
    >>> rows.encode(np.ones((2, 130), np.float32), wire)
    >>> rows.decode(wire, np.empty((2, 130), np.float32)).sum()
    np.float32(260.0)
    """

    spec: QuantSpec
    width: int

    def __post_init__(self) -> None:
        spec = self.spec
        if not isinstance(spec.granularity, PerGroup) or (spec.bits, spec.symmetric, spec.scale) != (8, True, "fp32"):
            raise ValueError(f"spec: expected symmetric codes of 8 bits with float32 scales of groups, found {spec}")

    @cached_property
    def group(self) -> int:
        """Elements that share a scale."""
        assert isinstance(self.spec.granularity, PerGroup)
        return self.spec.granularity.size

    @cached_property
    def start(self) -> int:
        """Bytes of a row's scales. Its codes follow them."""
        return 4 * -(-self.width // self.group)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.start + 4 * -(-self.width // 4)

    def scales(self, wire: Array) -> Array:
        """Scales of encoded rows: view of float32, shape (rows, groups)."""
        return wire[:, : self.start].view(np.float32)

    def codes(self, wire: Array) -> Array:
        """Codes of encoded rows: view of uint8, shape (rows, width)."""
        return wire[:, self.start : self.start + self.width]

    def encode(self, x: Array, wire: Array) -> None:
        """Encode rows of float32, shape (rows, width), as bytes, shape (rows, nbytes), C-contiguous both.

        Groups with NaN or infinity become NaN. ValueError for arrays of other types, lengths or layouts.
        """
        self._check(x, wire, wire)
        scales, codes = self.scales(wire), self.codes(wire)
        if not quantize_in_one_pass(x, self.spec, self.group, scales, codes):
            found = quantize(x, self.spec, nonfinite="poison")
            scales[...] = found.part("scale0").reshape(scales.shape)
            codes[...] = found.part("codes").reshape(codes.shape)
        wire[:, self.start + self.width :] = 0

    def decode(self, wire: Array, out: Array) -> Array:
        """Decode rows of bytes into `out`, float32, shape (rows, width), C-contiguous, and return it.

        ValueError for arrays of other types, lengths or layouts.
        """
        self._check(out, wire, out)
        codes, scales, size = self.codes(wire), self.scales(wire), self.group
        if self.spec.linear:
            kernels.decode_linear(codes, size, scales, None, LinearCode.of(self.spec), out, False)
        else:
            levels = array_namespace(wire).asarray(values(self.spec.code))
            kernels.decode_table(codes, 8, size, scales, levels, out, False)
        return out

    def _check(self, rows: Array, wire: Array, written: Array) -> None:
        """Raise ValueError unless these are rows and as many rows of bytes, contiguous, one of them to be written."""
        expected = (len(rows), self.width), np.float32, (len(rows), self.nbytes), np.uint8
        if (rows.shape, rows.dtype, wire.shape, wire.dtype) != expected:
            raise ValueError(
                f"expected float32 (n, {self.width}) and uint8 (n, {self.nbytes}), "
                f"found {rows.dtype} {rows.shape} and {wire.dtype} {wire.shape}"
            )
        if not (rows.flags.c_contiguous and wire.flags.c_contiguous and writable(written)):
            raise ValueError("expected C-contiguous rows, and the destination writable")

    @cached_property
    def _levels(self) -> Array | None:
        """Number for each byte, float32. None: bytes are int8."""
        if self.spec.linear:
            return None if self.spec.signed else np.arange(256, dtype=np.float32)
        return values(self.spec.code)

    def _about(self, wire: Array) -> tuple[Array, int, Array, Array | None]:
        return self.codes(wire), self.group, self.scales(wire), self._levels

    def _decoded(self, wire: Array) -> Array:
        return self.decode(wire, array_namespace(wire).empty((len(wire), self.width), np.float32))

    def add(self, wire: Array, y: Array, places: Array, weights: Array | None = None) -> None:
        """Add rows of bytes, decoded, perhaps times weights (n, 1), to the rows `places` of y, each at most once."""
        if not kernels.add_rows(*self._about(wire), y, places, weights):
            rows = self._decoded(wire)
            y[places] += rows if weights is None else weights * rows

    def products(self, wire: Array, x: Array, places: Array) -> Array:
        """Sums (n,) of the rows `places` of x times decoded rows of bytes, in the dtype of x."""
        found = array_namespace(wire).empty(len(wire), x.dtype)
        if not kernels.multiply_rows(*self._about(wire), x, places, found):
            found[...] = (x[places] * self._decoded(wire)).sum(axis=-1)
        return found
