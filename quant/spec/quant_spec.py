"""How numbers become few bits, as a value: `QuantSpec` says all of it, and everything else follows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from quant.formats import MINIFLOATS, TABLES
from quant.spec.granularity import Granularity, PerChannel, PerGroup, PerTensor

CODES = ("linear", *(name for name, kind in MINIFLOATS.items() if kind.bits <= 8), *TABLES, "kmeans")
RANGES = ("restricted", "full", "centred", "peak")
ROUNDINGS = ("nearest_even", "half_away", "half_up", "stochastic")
SCALE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "e8m0": 8, "e4m3": 8, **{f"uint{b}": b for b in range(1, 9)}}
ZEROS = ("integer", "fp32", "fp16", "bf16")
TENSOR = PerTensor()
GRANULARITIES = {kind.__name__: kind for kind in (PerTensor, PerChannel, PerGroup)}


def _one_of(name: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(map(str, allowed))}; not {value!r}")


@dataclass(frozen=True)
class Scales:
    """The format of scales; with a parent, of what is left of them when a larger scale is taken out.

    The scales of an array are an array themselves, of shape (lines, groups of a line). With a parent it is quantised in
    turn: S = gamma S_q, S_q in this format, and a gamma for every group of `granularity` among the scales. Parents may
    have parents.

    Parameters
    ----------
    format : str
        fp32, fp16, bf16; e8m0 (a power of two); e4m3; uint1 to uint8 (integers, which need a parent).
    granularity : Granularity
        Which scales share one of the parent's: `PerTensor()`, `PerChannel(0)` (those of a line) or `PerGroup(size)`.
    parent : Scales, optional
    """

    format: str = "fp32"
    granularity: Granularity = TENSOR
    parent: Scales | None = None

    def __post_init__(self) -> None:
        _one_of("the format of scales", self.format, SCALE_BITS)
        if self.format.startswith("uint") and self.parent is None:
            raise ValueError(f"scales in {self.format} need a parent")
        if self.parent is not None and not self.format.startswith(("uint", "e4m3")):
            raise ValueError(f"scales with a parent are small integers or e4m3, not {self.format}")

    @property
    def bits(self) -> int:
        """Of one scale, without its parent's share."""
        return SCALE_BITS[self.format]

    @property
    def levels(self) -> tuple[Scales, ...]:
        """This one, its parent, and so on."""
        return (self, *(self.parent.levels if self.parent else ()))


@dataclass(frozen=True)
class QuantSpec:
    """A way to write numbers in few bits: r = S (q - Z), or r = S values[q].

    Parameters
    ----------
    bits : int
        Of a code, 1 to 8.
    signed : bool
        Whether q is from -2^(b-1) on, or from 0. Only for linear codes.
    symmetric : bool
        Without, a zero point Z is stored for every group, and the whole range from the least to the largest element is
        used, extended so that 0 is a code.
    granularity : PerTensor, PerChannel or PerGroup
        Which elements share a scale.
    code : str
        linear; a small float (e2m1, e2m3, e3m2, e4m3, e5m2); nf4; kmeans (levels of its own for every group, which are
        stored in the format `scale` instead of scales).
    q_range : str
        Which q a symmetric linear code uses, and what the scale is, q_max being 2^(b-1) - 1 (2^b - 1 without a sign):
        restricted, S = max|r| / q_max, q from -q_max; full, S = max|r| / 2^(b-1), q from -2^(b-1), so that the largest
        positive element may clip; centred, S = max|r| / (2^(b-1) - 1/2), q from -2^(b-1); peak, S = (the element that
        is largest in size) / -2^(b-1), of either sign.
    rounding : str
        nearest_even; half_away (from zero); half_up; stochastic (up with the fraction's probability, drawn from
        a seed and the element's number, so that it can be repeated).
    scale : str or Scales
    zero : str
        integer: Z is rounded and stored in `bits` bits. fp32, fp16, bf16: Z is stored as it is, and the range need not
        hold 0.
    divisor : str
        stored: codes are r / S, S as it is stored. inverse: codes are r times 1 / S, S before it was rounded to its
        format; so do ggml and PyTorch.

    Raises
    ------
    ValueError
        If something is none of these, or the parts do not go together.

    Examples
    --------
    >>> QuantSpec(bits=4, granularity=PerGroup(32), scale="fp16").bits_per_element
    4.5
    >>> QuantSpec(bits=9)
    Traceback (most recent call last):
        ...
    ValueError: bits is one of 1, 2, 3, 4, 5, 6, 7, 8; not 9
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
        _one_of("bits", self.bits, range(1, 9))
        _one_of("code", self.code, CODES)
        _one_of("q_range", self.q_range, RANGES)
        _one_of("rounding", self.rounding, ROUNDINGS)
        _one_of("zero", self.zero, ZEROS)
        _one_of("divisor", self.divisor, ("stored", "inverse"))
        if not isinstance(self.granularity, PerTensor | PerChannel | PerGroup):
            raise ValueError(
                f"granularity is PerTensor(), PerChannel(axis) or PerGroup(size), not {self.granularity!r}"
            )
        levels = self.scales.levels
        if self.linear:
            if self.symmetric and self.signed and self.q_range != "peak" and self.q_max == 0:
                raise ValueError(
                    "one bit with a sign has the codes -1 and 0 alone: take q_range='peak' or signed=False"
                )
            if self.q_range == "peak" and (not self.symmetric or not self.signed or len(levels) > 1):
                raise ValueError("q_range='peak' is for symmetric codes with a sign, and scales of one level")
            if self.q_range == "peak" and self.scales.format not in ("fp32", "fp16", "bf16"):
                raise ValueError(
                    f"q_range='peak' makes scales of either sign, which {self.scales.format} does not have"
                )
            return
        width = {**{name: kind.bits for name, kind in MINIFLOATS.items()}, **dict.fromkeys(TABLES, 4)}
        if self.bits != width.get(self.code, self.bits):
            raise ValueError(f"{self.code} has {width[self.code]} bits, not {self.bits}")
        if not self.symmetric or not self.signed or self.q_range != "restricted":
            raise ValueError(f"signed, symmetric and q_range are for linear codes, not {self.code}")
        if self.rounding not in ("nearest_even", "stochastic") or (
            self.rounding == "stochastic" and not self.minifloat
        ):
            raise ValueError(f"{self.code} has no rounding {self.rounding!r}")
        if self.code == "kmeans" and (len(levels) > 1 or self.scales.format not in ("fp32", "fp16", "bf16")):
            raise ValueError("the levels of kmeans are stored as fp32, fp16 or bf16, without a parent")

    @property
    def scales(self) -> Scales:
        """The scales' format, a name or not."""
        return Scales(self.scale) if isinstance(self.scale, str) else self.scale

    @property
    def linear(self) -> bool:
        """Whether r = S (q - Z)."""
        return self.code == "linear"

    @property
    def minifloat(self) -> bool:
        """Whether codes are small floats."""
        return self.code in MINIFLOATS

    @property
    def q_max(self) -> int:
        """The largest q."""
        return 2 ** (self.bits - self.signed) - 1

    @property
    def q_min(self) -> int:
        """The smallest q."""
        if not self.signed:
            return 0
        return -self.q_max if self.symmetric and self.q_range == "restricted" else -(2 ** (self.bits - 1))

    @property
    def bias(self) -> int:
        """What is added to q where it is stored: 2^(b-1) below 8 bits with a sign; 8 bits are int8 as they are."""
        return 2 ** (self.bits - 1) if self.linear and self.signed and self.bits < 8 else 0

    @property
    def bits_per_element(self) -> float:
        """Bits of an element in a long array of full groups, scales and zero points counted.

        What is there once per tensor or per channel is taken to be spread over so many elements that it does not count;
        `Layout.bits_per_element` counts all of a given array.
        """
        return self.bits + _share(self.granularity) * (self._group_bits + _parents_bits(self.scales))

    @property
    def _group_bits(self) -> int:
        """Of a group, beside its codes."""
        if self.code == "kmeans":
            return self.scales.bits * 2**self.bits
        zero = 0 if self.symmetric else self.bits if self.zero == "integer" else SCALE_BITS[self.zero]
        return self.scales.bits + zero

    def replace(self, **changes: Any) -> QuantSpec:
        """The same with some fields changed.

        >>> QuantSpec(8).replace(rounding="stochastic").rounding
        'stochastic'
        """
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` reads them."""
        return {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> QuantSpec:
        """What `to_dict` gave.

        >>> spec = QuantSpec(4, granularity=PerGroup(16), scale=Scales("e4m3", parent=Scales("fp32")))
        >>> QuantSpec.from_dict(spec.to_dict()) == spec
        True
        """
        return cls(**{name: _rich(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Scales):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, PerTensor | PerChannel | PerGroup):
        return {"kind": type(value).__name__, **asdict(value)}
    return value


def _rich(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {name: _rich(part) for name, part in value.items() if name != "kind"}
    return GRANULARITIES[value["kind"]](**inner) if "kind" in value else Scales(**inner)


def _share(granularity: Granularity) -> float:
    """Groups per element of a long array."""
    return 1 / granularity.size if isinstance(granularity, PerGroup) else 0.0


def _parents_bits(scales: Scales) -> float:
    """Bits of all parents, for one of the scales."""
    if scales.parent is None:
        return 0.0
    return _share(scales.granularity) * (scales.parent.bits + _parents_bits(scales.parent))
