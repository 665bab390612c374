"""From an array to its codes: the range of every group, its scale as it is stored, then codes in units of that."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from quant import kernels
from quant.scaling import codebook
from quant.scaling import scales as scaling
from quant.array import Array, QuantizedArray
from quant.formats import values
from quant.spec.granularity import Blocking, to_lines
from quant.kernels import array_namespace
from quant.layout import layout
from quant.spec.quant_spec import QuantSpec

LARGEST = np.float32(np.finfo(np.float32).max)


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
    """The array in few bits.

    Parameters
    ----------
    x : array of floats, any shape
        Of NumPy or CuPy; computed with in float32.
    spec : QuantSpec
    scales : array of float32, shape (lines, groups), optional
        Use these instead of the groups' own ranges, as calibration found them: for a tensor one number will do, for
        channels one for each. They are rounded to their format. Elements beyond the range become its ends.
    zeros : array of float32, like `scales`
        The zero points to these, where the spec has some.
    seed : int, optional
        For stochastic rounding, which needs one: another seed, other random numbers.
    nonfinite : str
        What to do about NaN and infinity: raise a ValueError, or "poison": every number of a group that holds one
        becomes NaN.
    out : QuantizedArray, optional
        One of this spec and shape to fill. After an error its bytes mean nothing.

    Returns
    -------
    QuantizedArray
        `out`, if there is one.

    Raises
    ------
    ValueError
        For an element that is not finite; a scale that its format cannot hold; scales that do not fit the groups; an
        `out` that is of another kind; stochastic rounding without a seed.
    TypeError
        If `x` does not hold floating-point numbers.

    Examples
    --------
    >>> from quant import INT4_G32
    >>> q = quantize(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32), INT4_G32)
    >>> q.nbytes, q.bits_per_element
    (36, 4.5)
    """
    xp = array_namespace(x)
    lines = to_lines(_floats(x), spec.granularity)
    if out is None:
        out = QuantizedArray(spec, x.shape, xp.empty(layout(spec, tuple(x.shape)).nbytes, np.uint8))
    elif out.spec != spec or out.shape != tuple(x.shape):
        raise ValueError(f"out is {out}, and cannot hold {spec} of shape {x.shape}")
    if nonfinite not in ("raise", "poison"):
        raise ValueError(f"nonfinite is raise or poison, not {nonfinite!r}")
    key = _key(spec, seed)
    if not out.size:
        out.buffer[...] = 0
        return out
    if spec.code == "kmeans":
        if scales is not None or zeros is not None:
            raise ValueError("kmeans finds levels of its own and takes no scales")
        codebook.fit_into(lines, out)
        return out
    if scales is None and _at_once(lines, out):
        return out
    blocks = out.layout.blocks
    size, low = _range(lines, spec, blocks.size)
    finite = xp.isfinite(size) if low is None else xp.isfinite(size) & xp.isfinite(low)
    if not bool(finite.all()):
        if nonfinite == "raise" or spec.scales.format not in scaling.NAN:
            raise ValueError(_complaint(x, spec, nonfinite))
        lines = xp.where(scaling.spread(finite, blocks), lines, np.float32(0))
        size = xp.where(finite, size, np.float32(0))
        low = None if low is None else xp.where(finite, low, np.float32(0))
    if scales is not None:
        ideal, given = _given("scales", scales, blocks, xp), True
        if not bool((xp.isfinite(ideal) & (ideal != 0)).all()):
            raise ValueError("scales are finite and not 0")
    else:
        given = False
        ideal, low = (scaling.symmetric_scale(spec, size), low) if spec.symmetric else scaling.affine(spec, low, size)
    if spec.linear and not spec.symmetric and given != (zeros is not None):
        raise ValueError("scales and zeros of an asymmetric spec come together")
    stored = scaling.store(ideal, spec, out.layout.above)
    z = None
    if not spec.symmetric:
        z = _given("zeros", zeros, blocks, xp) if given else scaling.zero_point(spec, stored.scales, low)
        z = _put_zeros(out, z)
    for number, raw in enumerate(stored.levels):
        raw = raw.reshape(-1)
        if number == 0 and not bool(finite.all()):
            raw = xp.where(finite.reshape(-1), raw, raw.dtype.type(scaling.NAN[spec.scales.format]))
        out.put(f"scale{number}", raw)
    _encode(lines, out, ideal, stored.scales, z, key)
    return out


def _floats(x: Array) -> Array:
    """x as float32, C-contiguous if it is not."""
    xp = array_namespace(x)
    if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
        raise TypeError(f"x holds {x.dtype}, not floating-point numbers")
    if x.dtype == np.float32:
        return xp.ascontiguousarray(x).reshape(x.shape)
    if x.dtype == np.float64:
        with np.errstate(over="ignore"):
            return x.astype(np.float32)
    return x.astype(np.float32)


def _key(spec: QuantSpec, seed: int | None) -> tuple[int, int] | None:
    """The two words that random numbers hang on."""
    if spec.rounding != "stochastic":
        return None
    if seed is None:
        raise ValueError("stochastic rounding needs a seed")
    digest = blake2b(str(int(seed)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _at_once(lines: Array, out: QuantizedArray) -> bool:
    """The usual kind of spec in one go, where there is a kernel for that; False where there is none, or it gives up."""
    spec, form = out.spec, out.spec.scales.format
    usual = spec.linear and spec.symmetric and spec.signed and not spec.scales.parent
    if not usual or form not in ("fp32", "fp16", "bf16") or spec.rounding == "stochastic":
        return False
    rules = scaling.steps(spec), form, (spec.q_min, spec.q_max), spec.bias, spec.bits
    kind = spec.rounding, spec.divisor == "inverse", spec.q_range == "peak"
    scales = out.part("scale0")
    aligned = not isinstance(scales, np.ndarray) or scales.flags.aligned
    return aligned and kernels.quantize_linear(lines, out.layout.blocks.size, *rules, *kind, scales, out.part("codes"))


def _range(lines: Array, spec: QuantSpec, size: int) -> tuple[Array, Array | None]:
    """What the scale hangs on: (the largest |r|, None), or for codes that are not symmetric (largest, least)."""
    if not spec.symmetric or not spec.signed:
        low, high = kernels.minmax(lines, size)
        return (high if not spec.symmetric else array_namespace(high).maximum(high, np.float32(0))), low
    return (kernels.peak if spec.q_range == "peak" else kernels.absmax)(lines, size), None


def _complaint(x: Array, spec: QuantSpec, nonfinite: str) -> str:
    """Which element is not finite."""
    xp = array_namespace(x)
    flat = x.reshape(-1)
    first = int(xp.argmin(xp.isfinite(_floats(flat))))
    place = tuple(int(i) for i in np.unravel_index(first, x.shape))
    told = f"x{list(place)} is {float(flat[first])}, of which there is no code"
    return told if nonfinite == "raise" else f"{told}; scales in {spec.scales.format} have no NaN to poison groups with"


def _given(name: str, numbers: Array, blocks: Blocking, xp: Any) -> Array:
    """Somebody's numbers, one per group."""
    numbers = xp.asarray(numbers).astype(np.float32)
    if numbers.size != blocks.groups:
        raise ValueError(f"{name} are {numbers.size} numbers, for {blocks.groups} groups")
    return numbers.reshape(blocks.lines, blocks.per_line)


def _put_zeros(out: QuantizedArray, z: Array) -> Array:
    """Store the zero points; what was stored, as numbers."""
    xp, spec = array_namespace(z), out.spec
    if spec.zero != "integer":
        out.put("zeros", scaling.round_to(z, spec.zero, keep=False)[0])
        return out.zeros()
    if not bool(((z >= spec.q_min) & (z <= spec.q_max) & (z == xp.rint(z))).all()):
        raise ValueError(f"zeros are whole numbers from {spec.q_min} to {spec.q_max}")
    out.put("zeros", (z.astype(xp.int32) + spec.bias).astype(xp.uint8))
    return z


def _encode(lines: Array, out: QuantizedArray, ideal: Array, stored: Array, z: Array | None, key: Any) -> None:
    """The codes, in units of the scales as they are stored or as they were before."""
    xp, spec, size = array_namespace(lines), out.spec, out.layout.blocks.size
    inverse = spec.divisor == "inverse"
    if inverse:
        with np.errstate(divide="ignore", over="ignore"):
            by = xp.clip(1 / ideal, -LARGEST, LARGEST)
        by = xp.where(ideal == 0, np.float32(0), by)
    else:
        by = xp.where(stored == 0, np.float32(1), stored)
    if spec.linear:
        rules = (spec.q_min, spec.q_max), spec.bias, spec.rounding, key, spec.bits
        kernels.encode_linear(lines, size, by, inverse, z, *rules, out.part("codes"))
        return
    codes = out.part("codes") if spec.bits == 8 else xp.empty(out.size, np.uint8)
    fields = codes.reshape(lines.shape)
    if spec.minifloat:
        kernels.encode_float(lines, size, by, inverse, spec.code, key, fields)
    else:
        levels = values(spec.code)
        kernels.encode_table(lines, size, by, inverse, xp.asarray(codebook.thresholds(levels)), fields)
    if spec.bits < 8:
        out.put("codes", codes)
