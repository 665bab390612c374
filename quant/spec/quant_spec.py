"""`QuantSpec`: complete description of a quantisation as one value."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from quant.formats import MINIFLOATS, TABLES
from quant.spec.granularity import Granularity, PerChannel, PerGroup, PerTensor, from_front, whole_number

CODES = ("linear", *(name for name, kind in MINIFLOATS.items() if kind.bits <= 8), *TABLES, "kmeans")
ROUNDINGS = ("nearest_even", "half_away", "half_up", "stochastic")
SCALE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "e8m0": 8, "e4m3": 8, **{f"uint{b}": b for b in range(1, 9)}}
CHOICES = {
    "code": CODES,
    "q_range": ("restricted", "full", "centred", "peak"),
    "rounding": ROUNDINGS,
    "zero": ("integer", "fp32", "fp16", "bf16"),
    "divisor": ("stored", "inverse"),
}
"""Allowed values of fields of a `QuantSpec`."""
TENSOR = PerTensor()
GRANULARITIES = {kind.__name__: kind for kind in (PerTensor, PerChannel, PerGroup)}


def _one_of(name: str, value: Any, allowed: Any) -> None:
    if value not in tuple(allowed):
        raise ValueError(f"{name}: expected one of {', '.join(map(str, allowed))}, found {value!r}")


def _granularity(name: str, value: Any) -> None:
    if not isinstance(value, PerTensor | PerChannel | PerGroup):
        raise ValueError(f"{name}: expected PerTensor(), PerChannel(axis) or PerGroup(size), found {value!r}")


@dataclass(frozen=True)
class Scales:
    """Storage format of scales. Scales may themselves be quantised, with parent scales.

    Scales form an array of shape (rows, groups). With a parent, S = gamma S_q: S_q in this format, one gamma per group
    of `granularity` among the scales. Parents may have parents.

    Parameters
    ----------
    format : str
        fp32, fp16, bf16, e8m0 (a power of two), e4m3, uint1 to uint8 (integers, which need a parent).
    granularity : Granularity
        Scales that share one parent scale: `PerTensor()`, `PerChannel(0)` (the scales of a row) or `PerGroup(size)`.
        Always `PerTensor()` without a parent.
    parent : Scales, optional
    """

    format: str = "fp32"
    granularity: Granularity = TENSOR
    parent: Scales | None = None

    def __post_init__(self) -> None:
        _one_of("format of scales", self.format, SCALE_BITS)
        _granularity("granularity of scales", self.granularity)
        if not (self.parent is None or isinstance(self.parent, Scales)):
            raise ValueError(f"parent of scales: expected Scales or None, found {self.parent!r}")
        if self.format.startswith("uint") and self.parent is None:
            raise ValueError(f"scales in {self.format} need a parent")
        # parents are for scales of small range, wide formats need none
        if self.parent is not None and not self.format.startswith(("uint", "e4m3")):
            raise ValueError(f"scales with a parent: expected small integers or e4m3, found {self.format}")
        object.__setattr__(self, "granularity", _of_matrix(self.granularity) if self.parent else TENSOR)

    @property
    def bits(self) -> int:
        """Bits of one scale, without its parent."""
        return SCALE_BITS[self.format]

    @property
    def levels(self) -> tuple[Scales, ...]:
        """Tuple of this `Scales`, its parent, the parent's parent, and so on."""
        return (self, *(self.parent.levels if self.parent else ()))


@dataclass(frozen=True)
class QuantSpec:
    """Quantisation scheme: a code q stands for r = S (q - Z), or r = S table[q]. S is a scale, Z a zero point.

    Parameters
    ----------
    bits : int
        Width of a code, 1 to 8.
    signed : bool
        True if q starts at -2^(b-1), False if at 0. Only for linear codes.
    symmetric : bool
        Without, a zero point Z is stored for every group, and the range is from the least to the largest element,
        extended so that 0 is a code.
    granularity : PerTensor, PerChannel or PerGroup
        Elements that share a scale.
    code : str
        linear, a small float (e2m1, e2m3, e3m2, e4m3, e5m2), nf4 or kmeans (own levels for every group, stored in the
        format `scale` instead of scales).
    q_range : str
        Range of a symmetric linear code, and its scale, q_max being 2^(b-1) - 1 (2^b - 1 if unsigned): restricted: S =
        max|r| / q_max, q from -q_max. full: S = max|r| / 2^(b-1), q from -2^(b-1), so that the largest positive
        element may clip. centred: S = max|r| / (2^(b-1) - 1/2), q from -2^(b-1). peak: S = (the element of largest
        magnitude) / -2^(b-1), of either sign.
    rounding : str
        nearest_even, half_away (from zero), half_up or stochastic (up with the fraction's probability, drawn
        reproducibly from a seed and the element's number).
    scale : str or Scales
        Name of a format (scales without a parent), or `Scales` with a parent.
    zero : str
        integer: Z is rounded and stored in `bits` bits. fp32, fp16, bf16: Z is stored as a floating-point number, and
        the range need not include 0. Then 0 may have no code. Far from 0 the range is extended by the rounding of Z.
    divisor : str
        stored: codes are r / S with the stored S. inverse: codes are r times 1 / S, S before rounding to its format.
        ggml and PyTorch do this.

    Examples
    --------
    >>> QuantSpec(bits=4, granularity=PerGroup(32), scale="fp16").bits_per_element
    4.5
    >>> QuantSpec(bits=9)
    Traceback (most recent call last):
        ...
    ValueError: bits: expected one of 1, 2, 3, 4, 5, 6, 7, 8, found 9
    """

    bits: int
    signed: bool = True
    symmetric: bool = True
    granularity: Granularity = TENSOR
    code: str = "linear"
    q_range: str = "restricted"
    rounding: str = "nearest_even"
    scale: str | Scales = "fp32"
    zero: str = "integer"
    divisor: str = "stored"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", whole_number("bits", self.bits))
        _one_of("bits", self.bits, range(1, 9))
        for name in ("signed", "symmetric"):
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                raise ValueError(f"{name}: expected True or False, found {value!r}")
            object.__setattr__(self, name, bool(value))
        if not isinstance(self.scale, str | Scales):
            raise ValueError(f"scale: expected the name of a format or Scales, found {self.scale!r}")
        # one form for equal specs, so that they compare equal
        if isinstance(self.scale, Scales) and self.scale.parent is None:
            object.__setattr__(self, "scale", self.scale.format)
        _granularity("granularity", self.granularity)
        for name, allowed in CHOICES.items():
            _one_of(name, getattr(self, name), allowed)
        if fault := (self._linear_fault if self.linear else self._table_fault)(self.scales):
            raise ValueError(fault)

    def _linear_fault(self, scales: Scales) -> str | None:
        """Error message if fields of a spec of linear codes contradict each other, else None."""
        peak = self.q_range == "peak"
        if self.symmetric and self.signed and not peak and self.q_max == 0:
            return "one bit with a sign has the codes -1 and 0 alone: take q_range='peak' or signed=False"
        if peak and (not self.symmetric or not self.signed or scales.parent):
            return "q_range='peak' is for symmetric codes with a sign, and scales of one level"
        # unsigned and power-of-two formats cannot store the sign of a peak scale
        if peak and scales.format not in ("fp32", "fp16", "bf16"):
            return f"q_range='peak' makes scales of either sign, which {scales.format} does not have"
        return None

    def _table_fault(self, scales: Scales) -> str | None:
        """Error message if fields of a spec of other than linear codes contradict each other, else None."""
        width = MINIFLOATS[self.code].bits if self.minifloat else 4 if self.code in TABLES else self.bits
        # codes of tables count thresholds, so they are always the nearest
        roundings = ("nearest_even", "stochastic") if self.minifloat else ("nearest_even",)
        if self.bits != width:
            return f"bits: expected {width} for {self.code}, found {self.bits}"
        if not self.symmetric or not self.signed or self.q_range != "restricted":
            return f"signed, symmetric and q_range are for linear codes, not {self.code}"
        if self.rounding not in roundings:
            return f"{self.code} has no rounding {self.rounding!r}"
        if self.code == "kmeans" and (scales.parent or scales.format not in ("fp32", "fp16", "bf16")):
            return "the levels of kmeans are stored as fp32, fp16 or bf16, without a parent"
        return None

    @property
    def scales(self) -> Scales:
        """Field `scale` as a `Scales`, also if it is the name of a format."""
        return Scales(self.scale) if isinstance(self.scale, str) else self.scale

    @property
    def linear(self) -> bool:
        """True for linear codes: r = S (q - Z)."""
        return self.code == "linear"

    @property
    def minifloat(self) -> bool:
        """True if codes are small floats."""
        return self.code in MINIFLOATS

    @property
    def q_max(self) -> int:
        """Largest integer code q."""
        return (1 << (self.bits - self.signed)) - 1

    @property
    def q_min(self) -> int:
        """Smallest integer code q."""
        if not self.signed:
            return 0
        return -self.q_max if self.symmetric and self.q_range == "restricted" else -(2 ** (self.bits - 1))

    @property
    def bias(self) -> int:
        """Offset added to q in storage: 2^(b-1) for signed codes below 8 bits. 8-bit codes are stored as int8."""
        return 2 ** (self.bits - 1) if self.linear and self.signed and self.bits < 8 else 0

    @property
    def bits_per_element(self) -> float:
        """Bits per element of a long array of full groups, with scales and zero points.

        Parts that exist once per tensor or channel do not count. `BufferLayout.bits_per_element` counts all of a given
        array.
        """
        return self.bits + _share(self.granularity) * (self._group_bits + _parents_bits(self.scales))

    @property
    def _group_bits(self) -> int:
        """Bits of a group's scale (or kmeans levels) and zero point."""
        if self.code == "kmeans":
            return self.scales.bits << self.bits
        zero = 0 if self.symmetric else self.bits if self.zero == "integer" else SCALE_BITS[self.zero]
        return self.scales.bits + zero

    def replace(self, **changes: Any) -> QuantSpec:
        """Copy with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Fields as plain values for JSON. The inverse of `from_dict`."""
        return {name: _to_json(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> QuantSpec:
        """Create a spec from the values of `to_dict`. ValueError if they are invalid.

        >>> spec = QuantSpec(4, granularity=PerGroup(16), scale=Scales("e4m3", parent=Scales("fp32")))
        >>> QuantSpec.from_dict(spec.to_dict()) == spec
        True
        """
        try:
            return cls(**{name: _from_json(value) for name, value in values.items()})
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"no fields of a QuantSpec: {type(error).__name__}: {error}") from error


def _to_json(value: Any) -> Any:
    if isinstance(value, Scales):
        return {name: _to_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, PerTensor | PerChannel | PerGroup):
        return {"kind": type(value).__name__, **asdict(value)}
    return value


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {name: _from_json(part) for name, part in value.items() if name != "kind"}
    return GRANULARITIES[value["kind"]](**inner) if "kind" in value else Scales(**inner)


def _of_matrix(granularity: Granularity) -> Granularity:
    """Granularity of scales, seen as a matrix: 0 is the axis of rows and -1 the axis of groups along them."""
    granularity = from_front(granularity, 2)
    if isinstance(granularity, PerGroup) and granularity.axis == 1:
        return PerGroup(granularity.size)
    return granularity


def same(one: QuantSpec, other: QuantSpec, ndim: int) -> bool:
    """True if specs are equal for arrays of `ndim` dimensions. Axis -1 equals the last axis."""
    if one == other:
        return True
    alike = other.replace(granularity=from_front(other.granularity, ndim))
    return one.replace(granularity=from_front(one.granularity, ndim)) == alike


def _share(granularity: Granularity) -> float:
    """Groups per element of a long array: 1 / size, or 0 if their number does not grow with it."""
    return 1 / granularity.size if isinstance(granularity, PerGroup) else 0.0


def _parents_bits(scales: Scales) -> float:
    """Bits of all parent scales, per scale."""
    if scales.parent is None:
        return 0.0
    return _share(scales.granularity) * (scales.parent.bits + _parents_bits(scales.parent))
