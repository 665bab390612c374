"""Codecs: encoding of float32 vectors as bytes, and decoding, on the host and on a GPU."""

from collections.abc import Callable
from operator import index
from typing import Protocol

from quant import PerChannel, PerGroup, QuantizedArray, QuantSpec, quantize, wire_nbytes
from quant.kernels import array_namespace
from quant.types import Array


class Codec(Protocol):
    """Protocol of codecs: encode float32 vectors as bytes and decode them.

    `block` elements are encoded together: parts of a vector are whole blocks, except for the last one. A codec that
    encodes differently by position also has ``within(start, count)``, the codec of `count` elements from the block
    boundary `start` on. Any of them decodes. Vectors and bytes are both of NumPy, or both of CuPy.
    """

    block: int

    def nbytes(self, count: int) -> int:
        """Size in bytes of `count` encoded elements, independent of their values."""

    def encode(self, x: Array, wire: Array) -> None:
        """Encode x into the bytes `wire`. Blocks with a non-finite element decode to non-finite elements only."""

    def decode(self, wire: Array, out: Array) -> None:
        """Decode the bytes `wire` into the elements `out`."""

    def add(self, wire: Array, out: Array) -> None:
        """Decode the bytes `wire` and add them to `out`."""


def required_codec(codec: Codec) -> Codec:
    """Return the codec. Raise TypeError for anything else, such as a number of bits or a `QuantSpec`."""
    if not all(hasattr(codec, name) for name in ("block", "nbytes", "encode", "decode", "add")):
        raise TypeError(f"codec: expected a codec such as QuantCodec(spec), found {codec!r}")
    return codec


def within(codec: Codec, start: int, count: int) -> Codec:
    """Codec for `count` elements of a vector from `start` on: the codec itself unless it depends on position."""
    return codec.within(start, count) if hasattr(codec, "within") else codec


def encode_part(codec: Codec, part: Array, wire: Array, lost: Array | None, scratch: Array) -> None:
    """Encode `part` into the bytes `wire`. Store the encoding error in `lost` (may be None, or `part`)."""
    codec.encode(part, wire)
    if lost is not None:
        decoded = scratch[: len(part)]
        codec.decode(wire, decoded)
        array_namespace(part).subtract(part, decoded, out=lost)


class QuantCodec:
    """Codec that quantises with `quant`. Groups with a non-finite element become NaN (ValueError if scales have none).

    Parameters
    ----------
    spec : quant.QuantSpec
        Groups along the vector, or one scale per encoded part. Channels raise ValueError.
    norm : callable (x) -> float32 array, optional
        Scale of each group, in place of the spec's own: finite, and not 0.
    seed : int, optional
        Required for stochastic rounding, and different on every rank, such as ``comm.Get_rank()``: with equal seeds
        the rounding errors of ranks would add up rather than cancel out. Every encoded vector has random numbers of
        its own, never the numbers of another seed.
    """

    def __init__(self, spec: QuantSpec, norm: Callable[[Array], Array] | None = None, seed: int | None = None):
        if isinstance(spec.granularity, PerChannel):
            raise ValueError(f"spec: expected groups or one scale, as a vector has no channels, found {spec}")
        if spec.rounding == "stochastic" and seed is None:
            raise ValueError("seed: stochastic rounding needs one, different on every rank")
        self.spec, self._norm = spec, norm
        self.reseed(seed or 0)
        self.block = spec.granularity.size if isinstance(spec.granularity, PerGroup) else 1

    def reseed(self, seed: int) -> None:
        """Restart the random numbers of stochastic rounding from `seed`."""
        self._seed, self._encoded = index(seed), 0

    def nbytes(self, count: int) -> int:
        return wire_nbytes(self.spec, count)

    def encode(self, x: Array, wire: Array) -> None:
        self._encoded += 1
        seed = (self._seed << 64) + self._encoded
        scales = self._norm(x) if self._norm and len(x) else None
        quantize(x, self.spec, scales=scales, seed=seed, nonfinite="poison", out=self._as_array(wire, len(x)))

    def decode(self, wire: Array, out: Array) -> None:
        self._as_array(wire, len(out)).dequantize(out)

    def add(self, wire: Array, out: Array) -> None:
        """Dequantise `wire` and add it to `out` in one pass."""
        self._as_array(wire, len(out)).add_to(out)

    def _as_array(self, wire: Array, count: int) -> QuantizedArray:
        return QuantizedArray.from_wire(wire, self.spec, count)
