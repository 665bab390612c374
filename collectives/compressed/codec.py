"""Codecs: encoding of float32 vectors as bytes, and decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from quant import PerChannel, PerGroup, QuantizedArray, QuantSpec, quantize, wire_nbytes


class Codec(Protocol):
    """Encoding of a float32 vector of one length as bytes.

    Attributes
    ----------
    block : int
        Elements that are encoded together: ranks get whole blocks, but for the last one.
    """

    block: int

    def nbytes(self, count: int) -> int:
        """Encoded bytes of `count` elements; independent of their values."""

    def encode(self, x: np.ndarray, wire: np.ndarray) -> None:
        """Write `nbytes` bytes. An element that is not finite leaves none of its block finite."""

    def decode(self, wire: np.ndarray, out: np.ndarray) -> None:
        """Decode the bytes."""

    def add(self, wire: np.ndarray, out: np.ndarray) -> None:
        """`out` += what the bytes stand for."""


@runtime_checkable
class EncodedSlot(Codec, Protocol):
    """A codec that encodes otherwise elsewhere in the vector."""

    def within(self, start: int, count: int) -> Codec:
        """Codec of `count` elements from `start` on, a block boundary."""


def required_codec(codec: Codec) -> Codec:
    """Codec that was given.

    Raises
    ------
    TypeError
        If it is something else, such as a number of bits or a `QuantSpec`.
    """
    if not all(hasattr(codec, name) for name in ("block", "nbytes", "encode", "decode", "add")):
        raise TypeError(f"codec: expected a codec such as Quantised(spec), found {codec!r}")
    return codec


def within(codec: Codec, start: int, count: int) -> Codec:
    """Codec of a part of the vector: the codec itself unless it depends on the position."""
    return codec.within(start, count) if isinstance(codec, EncodedSlot) else codec


class QuantCodec:
    """Numbers in few bits, as `quant` writes them; a group that is not finite is NaN on the other side.

    Parameters
    ----------
    spec : quant.QuantSpec
        Groups along the vector, or one scale for each part that travels.
    norm : callable (x) -> float32 array of a scale for each group, optional
        Instead of the spec's own.
    seed : int, optional
        For stochastic rounding, which needs one; another one on every rank, as ``comm.Get_rank()`` is. With the same
        ones ranks would round alike, and errors of their terms would add up rather than cancel out. Vectors that are
        encoded one after another get random numbers of their own, and never those of another seed's.

    Raises
    ------
    ValueError
        For a spec with channels; for stochastic rounding without a seed.
    """

    def __init__(
        self, spec: QuantSpec, norm: Callable[[np.ndarray], np.ndarray] | None = None, seed: int | None = None
    ):
        if isinstance(spec.granularity, PerChannel):
            raise ValueError(f"a vector has no channels, and {spec} wants a scale for each")
        if spec.rounding == "stochastic" and seed is None:
            raise ValueError("seed: stochastic rounding needs one, another one on every rank")
        self.spec, self._norm = spec, norm
        self.reseed(seed or 0)
        self.block = spec.granularity.size if isinstance(spec.granularity, PerGroup) else 1

    def reseed(self, seed: int) -> None:
        """Begin anew with other random numbers."""
        self._seed, self._encoded = int(seed), 0

    def nbytes(self, count: int) -> int:
        """Codes and scales."""
        return wire_nbytes(self.spec, count)

    def encode(self, x: np.ndarray, wire: np.ndarray) -> None:
        """Quantise."""
        self._encoded += 1
        seed = (self._seed << 64) + self._encoded
        scales = self._norm(x) if self._norm else None
        quantize(x, self.spec, scales=scales, seed=seed, nonfinite="poison", out=self._as_array(wire, len(x)))

    def decode(self, wire: np.ndarray, out: np.ndarray) -> None:
        """Dequantise."""
        self._as_array(wire, len(out)).dequantize(out)

    def add(self, wire: np.ndarray, out: np.ndarray) -> None:
        """Dequantise and add in one pass."""
        self._as_array(wire, len(out)).add_to(out)

    def _as_array(self, wire: np.ndarray, count: int) -> QuantizedArray:
        return QuantizedArray.from_wire(wire, self.spec, count)
