"""Reference kernels for NumPy and CuPy. On the host they process runs of groups that fit the cache.

Elements come as `rows`, a C-contiguous matrix of float32, in groups of `size` along each row. The last group of a row
may be shorter. Values per group have shape (rows, groups per row). Unpacked codes are bytes in the matrix's order: q
plus a bias below 8 bits, int8 at 8 bits, the bits of a small float, or an index into a table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import numpy as np

from quant.formats import GREATEST, MINIFLOATS
from quant.kernels.headers import FORMULAS, constants
from quant.layout import BLOCK, POWERS, packed_nbytes
from quant.spec.quant_spec import QuantSpec
from quant.types import Array

_RANDOM = constants(FORMULAS)


class LinearCode(NamedTuple):
    """Parameters of an integer code: element r becomes clip(round(r / S) + Z) + bias, in `bits` bits.

    q is from `low` to `high`. Codes without a bias are int8 if `signed`. `key` is the random-number key of
    stochastic rounding.
    """

    bits: int
    low: int
    high: int
    bias: int
    signed: bool
    rounding: str
    key: tuple[int, int] | None

    @classmethod
    def of(cls, spec: QuantSpec, key: tuple[int, int] | None = None) -> LinearCode:
        return cls(spec.bits, spec.q_min, spec.q_max, spec.bias, spec.signed, spec.rounding, key)


class ScaleRule(NamedTuple):
    """Rule for a group's scale in `quantize_groups`: largest |r| divided by `steps`, stored in a format.

    `form` is fp32, fp16, bf16, e8m0, e4m3, "whole" (integers up to `top`) or "octaves": the power of two of the
    largest |r| times 2^-top. With `inverse`, codes are r times the inverse of the unrounded scale, instead of r
    divided by the stored scale. With `peak`, the scale has the sign of the element of largest magnitude, relative to
    the sign of `steps`.
    """

    steps: float
    form: str
    inverse: bool
    peak: bool
    top: float


Part = tuple[slice, slice]
"""Groups, and elements of these."""

Code = LinearCode | str | Array
"""Linear code, name of a small float, or thresholds (an element's code is the number of thresholds below it)."""


RUN = 1 << 14
"""Elements of a run: with its temporaries it fits a core's cache."""

MAGNITUDE = 0x7FFFFFFF
EXPONENT = 23

unchecked = np.errstate(over="ignore", invalid="ignore")
"""Decorator for functions whose results may overflow."""


def array_namespace(x: Array) -> ModuleType:
    """Array module of x: `numpy` or `cupy`. TypeError for anything else."""
    if isinstance(x, np.ndarray | np.generic):
        return np
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(x, cupy.ndarray):
        raise TypeError(f"expected an array of NumPy or CuPy, found {type(x).__name__}")
    return cupy


def _grouped(rows: Array, size: int) -> Array:
    """Matrix of all groups: a view if none is short, else a copy that repeats the last element of short ones."""
    columns = rows.shape[1]
    size = min(size, columns) or 1
    short = (0, -columns % size)
    return (array_namespace(rows).pad(rows, ((0, 0), short), mode="edge") if short[1] else rows).reshape(-1, size)


def _runs(groups: Array) -> Iterator[Part]:
    """Parts of the matrix that are processed one by one: groups, or pieces of long ones. Everything on a device."""
    count, size = groups.shape
    width = min(size, RUN) if isinstance(groups, np.ndarray) else size
    step = max(RUN // width, 1) if isinstance(groups, np.ndarray) else max(count, 1)
    for first in range(0, count, step):
        for column in range(0, size, width):
            yield slice(first, first + step), slice(column, column + width)


def _of_groups(rows: Array, size: int, function: Callable[[Array], Array]) -> Array:
    """Value per group: float32, shape (rows, groups per row)."""
    groups = _grouped(rows, size)
    if groups.shape[1] > RUN and isinstance(rows, np.ndarray):
        groups = _of_groups(groups, RUN, function)
    found = array_namespace(rows).empty(len(groups), np.float32)
    step = max(RUN // groups.shape[1] if isinstance(rows, np.ndarray) else len(groups), 1)
    for first in range(0, len(groups), step):
        found[first : first + step] = function(groups[first : first + step])
    return found.reshape(len(rows), -(-rows.shape[1] // size))


def _write(out: Array, size: int, of_run: Callable[[Part], Array], add: bool = False) -> None:
    """Write results of runs of groups to the matrix `out`, or add them to it."""
    groups = _grouped(out, size)
    for run in _runs(groups):
        if add:
            groups[run] += of_run(run)
        else:
            groups[run] = of_run(run)
    if groups.size != out.size:
        out[...] = groups.reshape(len(out), -1)[:, : out.shape[1]]


# ------------------------------------------------------------------------------------------ ranges of groups


def absmax(rows: Array, size: int) -> Array:
    """Largest magnitude in every group: float32, shape (rows, groups). Not finite if an element is not.

    Bits of |r| as integers have the order of |r|, with NaN above all, so a NaN is never lost.
    """
    return _of_groups(rows, size, lambda part: _magnitudes(part).max(axis=-1).view(np.float32))


def minmax(rows: Array, size: int) -> tuple[Array, Array]:
    """(smallest, largest) element of every group: shape (rows, groups). One is not finite if an element is not."""
    low = _of_groups(rows, size, lambda part: part.min(axis=-1))
    return low, _of_groups(rows, size, lambda part: part.max(axis=-1))


def peak(rows: Array, size: int) -> Array:
    """Element of largest magnitude of every group, with its sign: shape (rows, groups). The first of equal ones."""
    xp = array_namespace(rows)

    def farthest(part: Array) -> Array:
        return xp.take_along_axis(part, _magnitudes(part).argmax(axis=-1)[:, None], axis=-1)[:, 0]

    return _of_groups(rows, size, farthest)


def _magnitudes(part: Array) -> Array:
    return part.view(np.int32) & MAGNITUDE


# ------------------------------------------------------------------------------------------ rounding


def uniform(number: Array, key: tuple[int, int]) -> Array:
    """Pseudo-random numbers in [0, 1), functions of element number (uint64) and key: float32 with 24 random bits.

    Two rounds of the finaliser of MurmurHash3 (A. Appleby, public domain), one for either half of the number.
    """
    xp = array_namespace(number)
    low, high = (number & 0xFFFFFFFF).astype(xp.uint32), (number >> 32).astype(xp.uint32)
    word = _mixed(_mixed(low ^ np.uint32(key[0])) + high * np.uint32(_RANDOM["MIX_HIGH"]) + np.uint32(key[1]))
    return (word >> 8).astype(xp.float32) * np.float32(_RANDOM["UNIT_24"])


def _mixed(word: Array) -> Array:
    word = (word ^ (word >> 16)) * np.uint32(_RANDOM["MIX_FIRST"])
    word = (word ^ (word >> 13)) * np.uint32(_RANDOM["MIX_SECOND"])
    return word ^ (word >> 16)


def _rounded(t: Array, rounding: str, bias: float, drawn: Array | None) -> Array:
    """Round t to integers by a mode of `ROUNDINGS`, mostly in place, and return it.

    `half_up` adds the bias first, as ggml does, so that the sum rounds the same way.
    """
    xp = array_namespace(t)
    match rounding:
        case "nearest_even":
            return xp.rint(t, out=t)
        case "half_away":
            size = abs(t)
            down = xp.floor(size)
            return xp.copysign(down + (size - down >= np.float32(0.5)), t)
        case "half_up":
            t += np.float32(bias + 0.5)
            t = xp.floor(t, out=t)
            t -= np.float32(bias)
            return t
        case _:
            t += drawn
            return xp.floor(t, out=t)


def _encode(
    rows: Array, size: int, by: Array, multiply: bool, key: tuple[int, int] | None, out: Array,
    code_of: Callable[[Array, Part, Array | None], Array],
) -> None:  # fmt: skip
    """Write codes of elements in units of their groups' scales, ``code_of(elements, run, random numbers)``."""
    xp, groups, factor = array_namespace(rows), _grouped(rows, size), by.reshape(-1, 1)
    numbers = None if key is None else _grouped(xp.arange(rows.size, dtype=xp.uint64).reshape(rows.shape), size)
    scale = xp.multiply if multiply else xp.divide

    def codes_of(run: Part) -> Array:
        drawn = None if numbers is None or key is None else uniform(numbers[run], key)
        return code_of(scale(groups[run], factor[run[0]]), run, drawn)

    _write(out.reshape(rows.shape), size, codes_of)


# ------------------------------------------------------------------------------------------ codes


@unchecked
def encode_linear(
    rows: Array, size: int, by: Array, multiply: bool, zeros: Array | None, code: LinearCode, out: Array
) -> None:
    """Write packed linear codes of finite elements r to `out`: clip(round(r / S) + Z) + bias.

    `by` has the divisor of each group's elements, or with `multiply` their factor: finite, and not 0 as a divisor. Z is
    added after rounding if all `zeros` are integers, else before.
    """
    xp, low, high, bias = array_namespace(rows), np.float32(code.low), np.float32(code.high), np.float32(code.bias)
    shift = None if zeros is None else zeros.reshape(-1, 1)
    before = shift is not None and not bool((shift == xp.rint(shift)).all())
    dtype = np.int8 if code.signed and not code.bias else np.uint8  # a negative float as uint8 is undefined in C

    def code_of(t: Array, run: Part, drawn: Array | None) -> Array:
        if shift is not None and before:
            t += shift[run[0]]
        t = _rounded(t, code.rounding, code.bias, drawn)
        if shift is not None and not before:
            t += shift[run[0]]
        t = xp.clip(t, low, high, out=t)
        t += bias
        return t.astype(dtype).view(np.uint8)

    codes = out if code.bits == 8 else xp.empty(rows.size, xp.uint8)
    _encode(rows, size, by, multiply, code.key, codes, code_of)
    if code.bits < 8:
        pack(codes, code.bits, out)


@unchecked
def encode_float(
    rows: Array, size: int, by: Array, multiply: bool, code: str, key: tuple[int, int] | None, out: Array
) -> None:
    """Write codes of small floats to `out`, a byte each: r / S to the nearest, or with `key` rounded stochastically.

    Ties go to even, large values saturate. `code` is a key of `MINIFLOATS`. See `encode_linear` for the other
    parameters.
    """

    def code_of(t: Array, run: Part, drawn: Array | None) -> Array:
        return minifloat_bits(t, code, drawn).astype(np.uint8)

    _encode(rows, size, by, multiply, key, out, code_of)


def minifloat_bits(t: Array, code: str, drawn: Array | None = None) -> Array:
    """Bits (int32) of float32 values rounded to small floats, saturating: nearest even, or by random `drawn` in [0, 1).

    In units of the last place of its exponent, a number is an integer n. Exponents follow each other so that the bits
    are (exponent 2^mantissa) + n, even if n carries into the next exponent.
    """
    xp = array_namespace(t)
    kind = MINIFLOATS[code]
    size = xp.minimum(abs(t), np.float32(kind.largest))
    lowest = 127 + kind.lowest
    exponent = xp.maximum(size.view(xp.int32) >> EXPONENT, lowest)
    unit = (exponent - kind.mantissa) << EXPONENT
    size /= unit.view(xp.float32)
    n = xp.rint(size) if drawn is None else xp.floor(size + drawn)
    bits = ((exponent - lowest) << kind.mantissa) + n.astype(xp.int32)
    sign = (t.view(xp.int32) >> 31) & 1
    return bits | (sign << (kind.bits - 1))


@unchecked
def encode_table(rows: Array, size: int, by: Array, multiply: bool, thresholds: Array, out: Array) -> None:
    """Write the code of each element to `out` (uint8): the number of thresholds below the scaled element r / S.

    `thresholds` has shape (k,), or (rows, groups, k) for levels per group. See `encode_linear` for the other
    parameters.
    """
    xp, own = array_namespace(rows), thresholds.ndim > 1
    limits = thresholds.reshape(-1, thresholds.shape[-1])

    def code_of(t: Array, run: Part, drawn: Array | None) -> Array:
        count = xp.zeros(t.shape, xp.uint8)
        for k in range(limits.shape[1]):
            count += t > limits[run[0] if own else slice(1), k, None]
        return count

    _encode(rows, size, by, multiply, None, out, code_of)


def quantize_groups(
    rows: Array, size: int, rule: ScaleRule, code: Code, bits: int, gammas: Array | None, scales: Array, out: Array
) -> bool:
    """Write scales and packed codes in one pass, return True. False without such a kernel, or if a scale does not fit.

    The reference has none: the result is the same as from `absmax`, `quant.scaling.scales` and the codes. Elements
    need not be finite. Rounding is not stochastic. `scales` has an item per group: float32, uint16 for halves,
    otherwise a byte. Codes of 8 bits and their scales may be matrices with gaps between rows. `gammas`, float32, are
    parent scales, each for as many groups, in order, none of which is short.
    """
    return False


def _decode(
    packed: Array, bits: int, size: int, scales: Array, out: Array, add: bool, finite: bool,
    level_of: Callable[[Array, Part], Array],
) -> None:  # fmt: skip
    """Write numbers of codes, ``level_of(codes, run)`` times the groups' scales, to `out`, or add them."""
    xp, codes = array_namespace(packed), packed
    if bits < 8:
        unpack(packed, bits, codes := xp.empty(out.size, xp.uint8))
    groups, scales = _grouped(codes.reshape(out.shape), size), scales.reshape(-1, 1)

    def numbers(run: Part) -> Array:
        level = level_of(groups[run], run)
        if finite:
            level *= scales[run[0]]
            return xp.clip(level, -GREATEST, GREATEST, out=level)
        r = level * scales[run[0]]
        return xp.where(abs(level) <= GREATEST, xp.clip(r, -GREATEST, GREATEST), r)

    _write(out, size, numbers, add)


@unchecked
def decode_linear(
    packed: Array, size: int, scales: Array, zeros: Array | None, code: LinearCode, out: Array, add: bool
) -> None:
    """Decode packed linear codes q to `out`, a matrix of rows: S (q - Z), or with `add` added to `out`.

    Codes of 8 bits may be a matrix with gaps between rows.
    """
    shift = None if zeros is None else zeros.reshape(-1, 1)

    def level_of(codes: Array, run: Part) -> Array:
        level: Array = (codes.view(np.int8) if code.signed and not code.bias else codes) - np.float32(code.bias)
        if shift is not None:
            level -= shift[run[0]]
        return level

    _decode(packed, code.bits, size, scales, out, add, True, level_of)


@unchecked
def decode_table(packed: Array, bits: int, size: int, scales: Array, levels: Array, out: Array, add: bool) -> None:
    """Decode packed codes q to `out`, a matrix of rows, by a table: S levels[q], or with `add` added to `out`.

    `levels` has shape (k,), or (rows, groups, k) for levels per group. Codes of 8 bits may be a matrix with gaps.
    """
    own = levels.reshape(-1, levels.shape[-1]) if levels.ndim > 1 else None

    def level_of(codes: Array, run: Part) -> Array:
        places = codes.astype(np.int64)
        return levels[places] if own is None else array_namespace(codes).take_along_axis(own[run[0]], places, axis=-1)

    finite = surely_all(array_namespace(levels).isfinite(levels))
    _decode(packed, bits, size, scales, out, add, finite, level_of)


def add_rows(
    codes: Array, size: int, scales: Array, levels: Array | None, y: Array, places: Array, weights: Array | None
) -> bool:
    """Add decoded rows of bytes, perhaps times weights (n, 1), to rows of y in one pass, return True. False without.

    The reference has none: the result is the same as decoding, then y[places] += weights * rows. Bytes are int8, or
    numbers of `levels`. Codes and scales may be matrices with gaps between rows.
    """
    return False


def multiply_rows(
    codes: Array, size: int, scales: Array, levels: Array | None, x: Array, places: Array, products: Array
) -> bool:
    """Write the sums (n,) of rows of x times decoded rows of bytes in one pass. See `add_rows`."""
    return False


def surely_all(flags: Array) -> bool:
    """True if all flags are set. Always False on a device, since reading them would make the host wait."""
    return isinstance(flags, np.ndarray | np.generic) and bool(flags.all())


# ------------------------------------------------------------------------------------------ packing


def pack(codes: Array, bits: int, out: Array) -> None:
    """Pack codes of 1 to 7 bits, one per byte, densely into `out`, in the format of `quant.layout`."""
    xp, blocks, rest = array_namespace(codes), len(codes) // BLOCK, len(codes) % BLOCK
    planes = out[: blocks * 4 * bits].reshape(blocks, 4 * bits)
    for power, shift, places in _planes(bits, xp):
        fields = (codes[: blocks * BLOCK] >> shift) & (2**power - 1)
        plane = (fields.reshape(blocks, 8 // power, 4 * power) << places).sum(axis=1, dtype=xp.uint8)
        planes[:, 4 * shift : 4 * (shift + power)] = plane
    if rest:
        bit = (codes[-rest:, None] >> xp.arange(bits, dtype=xp.uint8)) & 1
        out[-packed_nbytes(rest, bits) :] = xp.packbits(bit, bitorder="little")


def unpack(packed: Array, bits: int, out: Array) -> None:
    """Unpack codes that `pack` packed, one per byte, into `out`: uint8, shape (n,)."""
    xp, blocks, rest = array_namespace(packed), len(out) // BLOCK, len(out) % BLOCK
    planes = packed[: blocks * 4 * bits].reshape(blocks, 4 * bits)
    out[...] = 0
    for power, shift, places in _planes(bits, xp):
        fields = (planes[:, None, 4 * shift : 4 * (shift + power)] >> places) & (2**power - 1)
        out[: blocks * BLOCK] |= fields.reshape(-1) << shift
    if rest:
        stream = xp.unpackbits(packed[-packed_nbytes(rest, bits) :], bitorder="little")[: rest * bits]
        out[-rest:] = (stream.reshape(rest, bits) << xp.arange(bits, dtype=xp.uint8)).sum(axis=1)


def _planes(bits: int, xp: ModuleType) -> Iterator[tuple[int, int, Array]]:
    """Planes of a width: (bits of a field, first bit in a code, places of the fields in a byte as a column)."""
    for power in POWERS[bits]:
        yield power, sum(POWERS[bits][: POWERS[bits].index(power)]), xp.arange(0, 8, power, dtype=xp.uint8)[:, None]
