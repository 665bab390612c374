"""Quantisation of an array: ranges of groups, scales, their rounding to a storage format, codes."""

from hashlib import blake2b
from typing import Any

import numpy as np

from quant import kernels
from quant.array import QuantizedArray, writable
from quant.formats import GREATEST, MINIFLOATS, as_float32, values
from quant.kernels import Code, LinearCode, ScaleRule, array_namespace, surely_all
from quant.layout import layout
from quant.scaling import codebook
from quant.scaling import scales as scaling
from quant.spec.granularity import to_rows, whole_number
from quant.spec.quant_spec import SCALE_BITS, QuantSpec, same
from quant.types import Array

UNSIGNED = ("e8m0", *(form for form in SCALE_BITS if form.startswith("uint")))
"""Formats of scales without negative numbers."""


def quantize(
    x: Array,
    spec: QuantSpec,
    *,
    scales: Array = None,
    zeros: Array = None,
    seed: int | None = None,
    nonfinite: str = "raise",
    out: QuantizedArray | None = None,
) -> QuantizedArray:
    """Quantise an array by a spec. Returns its codes, scales and zero points.

    ValueError if a scale is too large for its format, and for NaN and infinity unless `nonfinite` is "poison".

    Parameters
    ----------
    x : array of floats, any shape
        NumPy or CuPy, or anything `numpy.asarray` takes. Converted to float32. TypeError for other numbers.
    spec : QuantSpec
    scales, zeros : array of float32, shape (rows, groups), optional
        Scales, and for asymmetric specs zero points (ValueError for others), from calibration, to use instead of
        scales of the groups' own ranges. Elements beyond the range saturate. Scales on a GPU are not checked with
        "poison".
    seed : int, optional
        Seed of stochastic rounding (required for it).
    nonfinite : str
        "raise" a ValueError for NaN and infinity, or "poison": all elements of their group become NaN (kmeans and
        integer scales have no NaN and still raise). On a GPU, the host waits for it only to raise.
    out : QuantizedArray, optional
        Destination of the same spec and shape. It is returned. After an error its contents are undefined.

    Examples
    --------
    >>> from quant import INT4_G32
    >>> q = quantize(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32), INT4_G32)
    >>> q.nbytes, q.bits_per_element
    (36, 4.5)
    """
    x = _array(x)
    rows, out = to_rows(_floats(x), spec.granularity), _output(x, spec, out)
    if nonfinite not in ("raise", "poison"):
        raise ValueError(f"nonfinite: expected raise or poison, found {nonfinite!r}")
    if zeros is not None and spec.symmetric:
        raise ValueError(f"zeros: expected none for symmetric codes, found an array of shape {np.shape(zeros)}")
    key = _key(spec, seed)
    if not out.size:
        out.buffer[...] = 0
    elif spec.code == "kmeans":
        if scales is not None:
            raise ValueError("kmeans fits its own levels and takes no scales")
        codebook.fit_into(rows, out)
    # the fused kernel computes its own scales, so given ones take the steps
    elif scales is not None or not _in_one_pass(rows, out):
        _quantize_groups(x, rows, out, scales, zeros, nonfinite, key)
    return out


def _quantize_groups(
    x: Array, rows: Array, out: QuantizedArray, scales: Array, zeros: Array, nonfinite: str, key: Any
) -> None:
    """Quantise `rows` into `out` step by step: ranges of groups, scales, stored scales and zero points, codes."""
    xp, spec = array_namespace(rows), out.spec
    low, high = _range(rows, spec, out.layout.blocks.size)
    finite = xp.isfinite(low) & xp.isfinite(high)
    must_be = nonfinite == "raise" or spec.scales.format not in scaling.NAN
    if must_be and not bool(finite.all()):
        raise ValueError(_nonfinite_message(x, spec, nonfinite))
    # zeros keep the arithmetic of poisoned groups finite, and `_store_scales` marks them as NaN
    if not must_be and not surely_all(finite):
        rows = xp.where(scaling.spread(finite, out.layout.blocks), rows, np.float32(0))
        low, high = (xp.where(finite, bound, np.float32(0)) for bound in (low, high))
    if scales is not None:
        ideal = _given_scales(scales, out, nonfinite)
    elif spec.symmetric:
        ideal = scaling.symmetric_scale(spec, high)
    else:
        ideal, low = scaling.affine(spec, low, high)
    if spec.linear and not spec.symmetric and (scales is None) != (zeros is None):
        raise ValueError("scales and zeros of an asymmetric spec come together")
    stored = scaling.store(ideal, spec, out.layout.parent_levels)
    zero_points = _store_zeros(out, stored.scales, low, zeros)
    _store_scales(out, stored.levels, finite)
    _encode(rows, out, _divisors(spec, ideal, stored.scales), zero_points, key)


def _output(x: Array, spec: QuantSpec, out: QuantizedArray | None) -> QuantizedArray:
    """`out` after a check of its spec and shape, or a new quantised array for x, not yet filled."""
    if out is None:
        buffer = array_namespace(x).empty(layout(spec, tuple(x.shape)).nbytes, np.uint8)
        return QuantizedArray(spec, x.shape, buffer)
    if out.shape != tuple(x.shape) or not same(out.spec, spec, x.ndim):
        raise ValueError(f"out: expected {spec} of shape {x.shape}, found {out}")
    if not writable(out.buffer):
        raise ValueError("out: expected a writable buffer, found a read-only one")
    return out


def _array(x: Any) -> Array:
    """`x` if it is a NumPy or CuPy array, else `numpy.asarray(x)`."""
    try:
        array_namespace(x)
    except TypeError:
        return np.asarray(x)
    return x


def _floats(x: Array) -> Array:
    """`x` as float32, C-contiguous if it was float32 already. TypeError unless it is of a floating-point dtype."""
    xp = array_namespace(x)
    if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
        raise TypeError(f"x: expected floating-point numbers, found {x.dtype}")
    if x.dtype == np.float32:
        return xp.ascontiguousarray(x).reshape(x.shape)
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def _key(spec: QuantSpec, seed: int | None) -> tuple[int, int] | None:
    """Random-number key of stochastic rounding, two 32-bit integers from the seed. None for other roundings."""
    if spec.rounding != "stochastic":
        return None
    if seed is None:
        raise ValueError("stochastic rounding needs a seed")
    digest = blake2b(str(whole_number("seed", seed)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def quantize_in_one_pass(
    rows: Array, spec: QuantSpec, size: int, scales: Array, codes: Array, gammas: Array | None = None
) -> bool:
    """Quantise rows by a fused kernel, in groups of `size`. False if there is none, or a scale does not fit.

    `gammas` are the stored parents of scales, if they have any.
    """
    form, top = spec.scales.format, 0.0
    usual = spec.symmetric and spec.signed and (gammas is None) == (spec.scales.parent is None)
    if not usual or spec.rounding == "stochastic":
        return False
    # the kernel in C stores whole words and cannot write to a misaligned view
    if isinstance(scales, np.ndarray) and not scales.flags.aligned:
        return False
    if form.startswith("uint"):
        form, top = "whole", scaling.LARGEST[form]
    elif form == "e8m0" and spec.minifloat:
        form, top = "octaves", float(MINIFLOATS[spec.code].highest)
    rule = ScaleRule(scaling.steps(spec), form, spec.divisor == "inverse", spec.q_range == "peak", top)
    return kernels.quantize_groups(rows, size, rule, _code(spec, None, rows), spec.bits, gammas, scales, codes)


def _in_one_pass(rows: Array, out: QuantizedArray) -> bool:
    """Quantise rows into `out` by a fused kernel, after one for the largest elements that share a parent's scale."""
    spec, size, levels = out.spec, out.layout.blocks.size, out.layout.parent_levels
    scales, codes = out.part("scale0"), out.part("codes")
    if not levels:
        return quantize_in_one_pass(rows, spec, size, scales, codes)
    # a parent must share whole groups only: the kernel walks both levels in step
    if rows.shape[1] % size or levels[0].length % levels[0].size or not (spec.symmetric and spec.signed):
        return False
    most = kernels.absmax(rows.reshape(1, -1), size * levels[0].size)
    if not surely_all(array_namespace(most).isfinite(most)):
        return False
    ideal = scaling.symmetric_scale(spec, most)
    outer = scaling.store_parent(ideal, spec.scales, levels, spec.divisor == "stored")
    items = scales if spec.scales.bits == 8 else np.empty(out.groups, np.uint8)
    if not quantize_in_one_pass(rows, spec, size, items, codes, outer.scales.reshape(-1)):
        return False
    for number, raw in enumerate((items, *outer.levels)):
        out.put(f"scale{number}", raw)
    return True


def _code(spec: QuantSpec, key: Any, rows: Array) -> Code:
    """Code of a spec as kernels take it."""
    if spec.linear:
        return LinearCode.of(spec, key)
    return spec.code if spec.minifloat else array_namespace(rows).asarray(codebook.thresholds(values(spec.code)))


def _range(rows: Array, spec: QuantSpec, size: int) -> tuple[Array, Array]:
    """(smallest, largest) element of each group. For signed symmetric specs both are max|r| (peak: with sign)."""
    if spec.symmetric and spec.signed:
        size_of_group = (kernels.peak if spec.q_range == "peak" else kernels.absmax)(rows, size)
        return size_of_group, size_of_group
    low, high = kernels.minmax(rows, size)
    return low, array_namespace(high).maximum(high, np.float32(0)) if spec.symmetric else high


def _given_scales(scales: Array, out: QuantizedArray, nonfinite: str) -> Array:
    xp, ideal = array_namespace(out.buffer), _given("scales", scales, out)
    if xp is not np and nonfinite == "poison":  # the host does not wait to check them
        return ideal
    if not bool((xp.isfinite(ideal) & (ideal != 0)).all()):
        raise ValueError("scales: expected finite numbers other than 0")
    if out.spec.scales.format in UNSIGNED and not bool((ideal > 0).all()):
        raise ValueError(f"scales in {out.spec.scales.format} have no sign, and {float(ideal.min()):.3g} is below 0")
    return ideal


def _nonfinite_message(x: Array, spec: QuantSpec, nonfinite: str) -> str:
    """Error message that names the first element that is not finite."""
    xp = array_namespace(x)
    flat = x.reshape(-1)
    first = int(xp.argmin(xp.isfinite(_floats(flat))))
    place = tuple(int(i) for i in np.unravel_index(first, x.shape))
    poison = "" if nonfinite == "raise" else f"; scales in {spec.scales.format} have no NaN to poison groups with"
    return f"x{list(place)} is {float(flat[first])}, which has no code{poison}"


def _given(name: str, numbers: Array, out: QuantizedArray) -> Array:
    """Scales or zero points from the caller as float32 of shape (rows, groups). ValueError unless one per group."""
    blocks, numbers = out.layout.blocks, as_float32(name, array_namespace(out.buffer).asarray(numbers))
    if numbers.size != blocks.groups:
        raise ValueError(f"{name}: expected {blocks.groups} numbers, one per group, found {numbers.size}")
    return numbers.reshape(blocks.rows, blocks.per_row)


def _store_zeros(out: QuantizedArray, scales: Array, low: Array, zeros: Array | None) -> Array | None:
    """Store zero points, given or computed, in `out`, and return them as stored. None for symmetric specs."""
    xp, spec = array_namespace(scales), out.spec
    if spec.symmetric:
        return None
    z = scaling.zero_point(spec, scales, low) if zeros is None else _given("zeros", zeros, out)
    if spec.zero != "integer":
        raw = z if spec.zero == "fp32" else scaling.halves(z, spec.zero)
        finite = xp.isfinite(scaling.numbers_of(raw, spec.zero))
        if not bool(finite.all()):
            wrong = float(z.reshape(-1)[int(xp.argmin(finite))])
            raise ValueError(f"zeros: expected finite numbers that fit {spec.zero}, found {wrong:.3g}")
        out.put("zeros", raw)
        return out.zeros()
    if not bool(((z >= spec.q_min) & (z <= spec.q_max) & (z == xp.rint(z))).all()):
        raise ValueError(f"zeros: expected whole numbers from {spec.q_min} to {spec.q_max}")
    out.put("zeros", (z.astype(xp.int32) + spec.bias).astype(xp.uint8))
    return z


def _store_scales(out: QuantizedArray, levels: tuple[Array, ...], finite: Array) -> None:
    """Store the scales of all levels in `out`. Groups that are not finite get the format's NaN."""
    xp, form = array_namespace(finite), out.spec.scales.format
    for number, raw in enumerate(levels):
        raw = raw.reshape(-1)
        if number == 0 and form in scaling.NAN and not surely_all(finite):
            raw = xp.where(finite.reshape(-1), raw, raw.dtype.type(scaling.NAN[form]))
        out.put(f"scale{number}", raw)


def _divisors(spec: QuantSpec, ideal: Array, stored: Array) -> tuple[Array, bool]:
    """(stored scales, False) if elements are divided by these. (inverse unrounded scales, True) if multiplied."""
    xp = array_namespace(ideal)
    if spec.divisor == "stored":
        return xp.where(stored == 0, np.float32(1), stored), False
    with np.errstate(divide="ignore", over="ignore"):
        by = xp.clip(1 / ideal, -GREATEST, GREATEST)
    return xp.where(ideal == 0, np.float32(0), by), True


def _encode(rows: Array, out: QuantizedArray, divisors: tuple[Array, bool], zeros: Array | None, key: Any) -> None:
    xp, spec, size = array_namespace(rows), out.spec, out.layout.blocks.size
    code: Any = _code(spec, key, rows)
    if spec.linear:
        kernels.encode_linear(rows, size, *divisors, zeros, code, out.part("codes"))
        return
    codes = out.part("codes") if spec.bits == 8 else xp.empty(out.size, np.uint8)
    if spec.minifloat:
        kernels.encode_float(rows, size, *divisors, code, key, codes.reshape(rows.shape))
    else:
        kernels.encode_table(rows, size, *divisors, code, codes.reshape(rows.shape))
    if spec.bits < 8:
        out.put("codes", codes)
