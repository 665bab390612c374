"""Scales and zero points from the ranges of groups, and their rounding to storage formats.

One number per group, the same code for every form of kernel.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from quant.formats import GREATEST, MINIFLOATS, values
from quant.kernels import absmax, array_namespace, decode_table, minifloat_bits, surely_all
from quant.spec.granularity import GroupBlocking
from quant.spec.quant_spec import QuantSpec, Scales
from quant.types import Array

LARGEST = {"e4m3": MINIFLOATS["e4m3"].largest, **{f"uint{b}": 2.0**b - 1 for b in range(1, 9)}}
"""Value of the largest scale in a parent's group."""

NORMAL = {form: np.float32(2.0**kind.lowest) for form, kind in MINIFLOATS.items()} | {"fp32": np.float32(2.0**-126)}
"""Smallest normal number of each floating-point format."""


ZERO_DIGITS = {form: (MINIFLOATS[form].mantissa, MINIFLOATS[form].largest) for form in ("fp16", "bf16")} | {
    "fp32": (23, float(GREATEST))
}
"""Bits after the first of floating-point zero points, and the largest of them."""


class StoredScales(NamedTuple):
    """Rounded scales: items of each level as stored, innermost first, and values (float32, shape (rows, groups))."""

    levels: tuple[Array, ...]
    scales: Array


def divided(r: Array, n: float) -> Array:
    """r / n in float32. Denormal results are rounded away from 0."""
    xp = array_namespace(r)
    quotient = abs(r) / np.float32(abs(n))
    with np.errstate(over="ignore"):
        enough = (quotient >= NORMAL["fp32"]) | (quotient * np.float32(abs(n)) >= abs(r))
    if not surely_all(enough):
        above = (quotient.view(xp.int32) + 1).view(xp.float32)
        quotient = xp.where(enough | (quotient != quotient), quotient, above)
    return xp.copysign(quotient, r if n > 0 else -r)


def symmetric_scale(spec: QuantSpec, size: Array) -> Array:
    """Scales of groups whose largest magnitude is `size` (for q_range peak with sign; unsigned: largest element).

    The scale of MX formats is 2^(floor(log2 max) - emax). The largest elements may clip.
    """
    if spec.minifloat and spec.scales.format == "e8m0":
        return _two_to((size.view(array_namespace(size).int32) >> 23) - 127 - MINIFLOATS[spec.code].highest)
    return divided(size, steps(spec))


def steps(spec: QuantSpec) -> float:
    """Divisor n of a symmetric code: a group's scale is its largest magnitude / n. Negative for q_range peak."""
    if spec.minifloat:
        return MINIFLOATS[spec.code].largest
    if not spec.linear:
        return float(abs(values(spec.code)).max())
    if not spec.signed:
        return spec.q_max
    most = 2.0 ** (spec.bits - 1)
    return {"restricted": most - 1, "full": most, "centred": most - 0.5, "peak": -most}[spec.q_range]


def _two_to(exponent: Array) -> Array:
    """2^exponent as float32. Exponents beyond -127 and 127 are clipped."""
    xp = array_namespace(exponent)
    bounded = xp.minimum(xp.maximum(exponent, -127), 127)
    return xp.where(bounded == -127, 0x00400000, (bounded + 127) << 23).astype(xp.int32).view(xp.float32)


def affine(spec: QuantSpec, low: Array, high: Array) -> tuple[Array, Array]:
    """(scale, lower end of the range) of asymmetric groups with these smallest and largest elements.

    An integer zero point extends the range to 0, so that 0 is represented exactly and Z is a code. Groups of equal
    elements are always extended. A floating-point one extends it by what its own rounding may move the range.
    """
    xp = array_namespace(low)
    extend = (low == high) | (spec.zero == "integer")
    low = xp.where(extend, xp.minimum(low, np.float32(0)), low)
    high = xp.where(extend, xp.maximum(high, np.float32(0)), high)
    count = spec.q_max - spec.q_min
    with np.errstate(over="ignore"):
        span, halves_added = high - low, divided(high, count) - divided(low, count)
    scale = xp.where(xp.isinf(span), xp.minimum(halves_added, GREATEST), divided(span, count))
    return (scale, low) if spec.zero == "integer" else _with_room(spec, scale, low, high)


def _with_room(spec: QuantSpec, scale: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """(scale, lower end) of ranges extended at both ends by half a unit in the last place of their zero points.

    Only of those with a unit of at least a step: the others clip by less than half a step. With n steps S the zero
    point is at most max|r| / S + n, and its unit 2^-d times that, where its format has d bits after the first.
    """
    xp, count = array_namespace(scale), spec.q_max - spec.q_min
    digits, largest = ZERO_DIGITS[spec.zero]
    near = abs(zero_point(spec, scale, low)) < np.float32(2.0**digits)
    if surely_all(near):
        return scale, low
    most = xp.maximum(abs(low), abs(high))
    wide = (scale + most * np.float32(2.0**-digits / count)) * np.float32(1 / (1 - 2.0**-digits))
    wide = xp.maximum(wide, most * np.float32(2 / largest))
    lower = low - (wide - scale) * np.float32(count / 2)
    return xp.where(near, scale, wide), xp.where(near, low, lower)


def zero_point(spec: QuantSpec, scale: Array, low: Array) -> Array:
    """Zero points Z = q_min - low / S for stored scales S. Rounded and clipped if the spec stores integers."""
    xp = array_namespace(scale)
    with np.errstate(over="ignore"):
        zero = float(spec.q_min) - low / xp.where(scale == 0, np.float32(1), scale)
    if spec.zero != "integer":
        return zero
    return xp.clip(xp.rint(zero), np.float32(spec.q_min), np.float32(spec.q_max)) + 0.0


def store(scale: Array, spec: QuantSpec, parent_levels: tuple[GroupBlocking, ...]) -> StoredScales:
    """Round scales of shape (rows, groups), non-negative unless q_range is peak, to their formats, level by level."""
    return _store(scale, spec.scales, parent_levels, spec.divisor == "stored")


def _store(scale: Array, kind: Scales, parent_levels: tuple[GroupBlocking, ...], up: bool) -> StoredScales:
    if kind.parent is None:
        raw, numbers = round_to(scale, kind.format, up)
        return StoredScales((raw,), numbers)
    xp, blocks = array_namespace(scale), parent_levels[0]
    most = absmax(scale.reshape(blocks.rows, blocks.length), blocks.size)
    outer = store_parent(most, kind, parent_levels, up)
    gamma = spread(outer.scales, blocks).reshape(scale.shape)
    raw, numbers = round_to(scale / xp.where(gamma == 0, np.float32(1), gamma), kind.format, up)
    return StoredScales((raw, *outer.levels), joined(gamma, numbers))


def store_parent(most: Array, kind: Scales, parent_levels: tuple[GroupBlocking, ...], up: bool) -> StoredScales:
    """Parent scales, stored. `most` has the largest scale of each group of scales that shares a parent."""
    assert kind.parent is not None
    return _store(divided(most, LARGEST[kind.format]), kind.parent, parent_levels[1:], up)


def joined(gamma: Array, numbers: Array) -> Array:
    """Product of parent scales `gamma` and the scales below them, limited to the largest finite float32."""
    with np.errstate(over="ignore"):
        return array_namespace(gamma).clip(gamma * numbers, -GREATEST, GREATEST)


def spread(of_groups: Array, blocks: GroupBlocking) -> Array:
    """Value per group repeated for each of its elements: shape (rows, length)."""
    xp = array_namespace(of_groups)
    return xp.repeat(of_groups.reshape(blocks.rows, blocks.per_row), blocks.size, axis=1)[:, : blocks.length]


def round_to(scale: Array, form: str, up: bool = True) -> tuple[Array, Array]:
    """Round scales to a format: (items as stored, float32 values). ValueError if one is too large for a float format.

    With `up`, numbers too small for the format's digits, its denormal ones, are rounded away from 0: a smaller scale
    would clip the largest element of its group.
    """
    xp = array_namespace(scale)
    if form == "fp32":
        return scale, scale
    if form == "e8m0":
        bits = scale.view(xp.int32)
        exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)
        exponent = xp.where(bits <= 0x00400000, -127, exponent)  # denormal, and not above 2^-127
        numbers = _two_to(exponent)
        return (xp.minimum(xp.maximum(exponent, -127), 127) + 127).astype(xp.uint8), numbers
    if form.startswith("uint"):
        whole = xp.minimum(xp.rint(scale), np.float32(LARGEST[form]))
        whole = xp.where((scale != 0) & (whole == 0), np.float32(1), whole) if up else whole
        return whole.astype(xp.uint8), whole
    limit = MINIFLOATS[form].largest
    raw = halves(scale, form) if form in ("fp16", "bf16") else minifloat_bits(scale, form).astype(xp.uint8)
    numbers = numbers_of(raw, form)
    # Halves overflow to infinity. e4m3 saturates: 464, half a step beyond its largest number, is the limit of rounding.
    fits = abs(scale) <= np.float32(464) if form == "e4m3" else abs(numbers) <= np.float32(limit)
    if not bool(fits.all()):
        raise ValueError(f"a scale of {float(abs(scale).max()):.3g} does not fit {form}, whose largest is {limit:.3g}")
    short = (abs(numbers) < abs(scale)) & (abs(scale) < NORMAL[form])
    if not up or not bool(short.any()):
        return raw, numbers
    raw = xp.where(short, raw + raw.dtype.type(1), raw)
    return raw, numbers_of(raw, form)


def halves(numbers: Array, form: str) -> Array:
    """Bits of float32 values rounded to fp16 or bf16, nearest even: uint16."""
    xp = array_namespace(numbers)
    if form == "fp16":
        with np.errstate(over="ignore"):
            return numbers.astype(xp.float16).view(xp.uint16)
    bits = xp.ascontiguousarray(numbers).view(xp.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return xp.where(numbers != numbers, np.uint32(0x7FC0), rounded).astype(xp.uint16)


def numbers_of(raw: Array, form: str) -> Array:
    """Values of stored items of a format such as fp16 or e8m0, as float32."""
    xp = array_namespace(raw)
    if form == "fp32":
        return raw
    if form == "fp16":
        return raw.view(xp.float16).astype(xp.float32)
    if form == "bf16":
        return (raw.astype(xp.uint32) << 16).view(xp.float32)
    numbers, one = xp.empty((1, raw.size), np.float32), xp.ones((1, min(raw.size, 1)), np.float32)
    decode_table(raw.reshape(-1), 8, max(raw.size, 1), one, xp.asarray(scale_values(form)), numbers, False)
    return numbers.reshape(raw.shape)


@cache
def scale_values(form: str) -> np.ndarray:
    """Table of the value of every item of a format of at most 8 bits: float32, cached."""
    if form == "e8m0":
        return np.append(_two_to(np.arange(-127, 128, dtype=np.int32)), np.float32(np.nan))
    return values(form) if form == "e4m3" else np.arange(LARGEST[form] + 1, dtype=np.float32)


NAN = {"fp32": np.float32(np.nan), "fp16": np.uint16(0x7E00), "bf16": np.uint16(0x7FC0), "e8m0": 255, "e4m3": 127}
"""Raw item that marks a group as NaN. Integer formats have none."""
