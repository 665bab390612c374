"""Reference kernels for NumPy and CuPy; on the host in tiles that fit the cache.

Elements come as `rows`, a C-contiguous matrix of float32, in groups of `size` along each row, the last of which may be
shorter; values per group have shape (rows, groups per row). Unpacked codes are bytes in the matrix's order: q plus a
bias below 8 bits, int8 at 8 bits, the bits of a small float, or an index into a table.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from quant.formats import GREATEST, LARGEST_LEVEL, MINIFLOATS
from quant.kernels.headers import RANDOM, constants
from quant.packing import BLOCK, POWERS, packed_nbytes
from quant.spec.quant_spec import QuantSpec
from quant.types import Array

_RANDOM = constants(RANDOM)


class Tile(NamedTuple):
    """Part of a matrix that is processed at once: its rows, columns and groups, and elements per group in it."""

    rows: slice
    columns: slice
    groups: slice
    width: int


class LinearCode(NamedTuple):
    """Parameters of an integer code: element r becomes clip(round(r / S) + Z) + bias, in `bits` bits.

    q is from `low` to `high`; codes without a bias are int8 if `signed`; `key` is that of the random numbers of
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

    `form` is fp32, fp16, bf16, e8m0, e4m3; "whole" (numbers up to `top`); or "octaves": the power of two of the largest
    |r| times 2^-top. With `inverse`, codes are r times the inverse of the unrounded scale, instead of r divided by the
    stored scale. With `peak`, the scale has the sign of the element of largest magnitude, relative to that of `steps`.
    """

    steps: float
    form: str
    inverse: bool
    peak: bool
    top: float


Code = LinearCode | str | Array
"""Linear code; name of a small float; or thresholds, which the code of an element counts."""


TILE = 1 << 16
"""Elements per tile: a tile and its temporaries fit a core's cache."""

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


def _tiles(shape: tuple[int, int], size: int, most: int) -> Iterator[Tile]:
    """Cut a matrix into tiles of at most `most` elements: whole groups of `size`, or pieces of longer groups."""
    count, length = shape
    whole = length - length % size
    for first, last, width in ((0, whole, size), (whole, length, length - whole)):
        step = min(width, most) if width > most else max(min(last - first, most) // max(width, 1), 1) * width
        if first == last or not count:
            continue
        for start in range(first, last, size) if width > most else (first,):
            stop = min(start + size, last) if width > most else last
            down = max(most // step, 1)
            for row in range(0, count, down):
                for column in range(start, stop, step):
                    end = min(column + step, stop)
                    groups = slice(column // size, (end - 1) // size + 1)
                    yield Tile(slice(row, row + down), slice(column, end), groups, min(width, end - column))


def _cut(rows: Array, size: int) -> tuple[Array, Iterator[Tile]]:
    """(matrix as one row if no group is short, else as it is; its tiles), with a single tile on a device."""
    if rows.shape[1] % size == 0:
        rows = rows.reshape(1, -1)
    return rows, _tiles(rows.shape, size, TILE if isinstance(rows, np.ndarray) else max(rows.size, size))


def _groups(rows: Array, tile: Tile) -> Array:
    """View of the elements of a tile: shape (rows, groups, elements per group)."""
    part, width = rows[tile.rows, tile.columns], tile.width
    return part.reshape(part.shape[0], part.shape[1] // width, width)


def _scratch(rows: Array, size: int, dtype: Any = np.float32) -> Any:
    """Function (shape) -> temporary array for a tile, always in the same memory, so that this stays in the cache."""
    xp = array_namespace(rows)
    space = xp.empty(min(rows.size, TILE) if xp is np else rows.size, dtype)

    def take(shape: tuple[int, ...]) -> Array:
        return space[: math.prod(shape)].reshape(shape)

    return take


def _per_group(rows: Array, size: int) -> tuple[int, int]:
    """(rows, groups per row): shape of arrays with one value per group of `size` elements."""
    return rows.shape[0], -(-rows.shape[1] // size)


# ------------------------------------------------------------------------------------------ ranges of groups


def absmax(rows: Array, size: int) -> Array:
    """Largest magnitude in every group: float32, shape (rows, groups); not finite if an element is not.

    Bits of |r| as integers have the order of |r|, with NaN above all, so a NaN is never lost.
    """
    xp = array_namespace(rows)
    cut, tiles = _cut(rows, size)
    largest = xp.zeros(_per_group(cut, size), xp.int32)
    scratch = _scratch(cut, size, np.int32)
    for tile in tiles:
        part = _groups(cut, tile).view(xp.int32)
        found = xp.bitwise_and(part, MAGNITUDE, out=scratch(part.shape)).max(axis=-1)
        into = largest[tile.rows, tile.groups]
        into[...] = xp.maximum(into, found)
    return largest.view(xp.float32).reshape(_per_group(rows, size))


def minmax(rows: Array, size: int) -> tuple[Array, Array]:
    """(smallest, largest) element of every group: shape (rows, groups); one is not finite if an element is not."""
    xp, shape = array_namespace(rows), _per_group(rows, size)
    cut, tiles = _cut(rows, size)
    low = xp.full(_per_group(cut, size), np.inf, xp.float32)
    high = xp.full(_per_group(cut, size), -np.inf, xp.float32)
    for tile in tiles:
        part, at = _groups(cut, tile), (tile.rows, tile.groups)
        low[at] = xp.minimum(low[at], part.min(axis=-1))
        high[at] = xp.maximum(high[at], part.max(axis=-1))
    return low.reshape(shape), high.reshape(shape)


def peak(rows: Array, size: int) -> Array:
    """Element of largest magnitude of every group, with its sign: shape (rows, groups); the first of equal ones."""
    xp = array_namespace(rows)
    cut, tiles = _cut(rows, size)
    found = cut[:, ::size].copy()
    for tile in tiles:
        part, at = _groups(cut, tile), (tile.rows, tile.groups)
        which = (part.view(xp.int32) & MAGNITUDE).argmax(axis=-1)
        here, before = xp.take_along_axis(part, which[..., None], axis=-1)[..., 0], found[at].copy()
        found[at] = xp.where((here.view(xp.int32) & MAGNITUDE) > (before.view(xp.int32) & MAGNITUDE), here, before)
    return found.reshape(_per_group(rows, size))


# ------------------------------------------------------------------------------------------ rounding


def uniform(first: int, shape: tuple[int, ...], stride: int, key: tuple[int, int], xp: ModuleType = np) -> Array:
    """Pseudo-random numbers in [0, 1), functions of element number and key: float32 with 24 random bits.

    Two rounds of the finaliser of MurmurHash3 (A. Appleby, public domain), one for either half of the number. The first
    element has number `first`; each row adds `stride`.
    """
    rows, columns = (xp.arange(n, dtype=xp.uint64) for n in shape)
    number = (rows * np.uint64(stride))[:, None] + columns[None] + np.uint64(first)
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


def _drawn(cut: Array, tile: Tile, key: tuple[int, int] | None) -> Array | None:
    """Random numbers for stochastic rounding of a tile's elements; None without a key."""
    if key is None:
        return None
    part = cut[tile.rows, tile.columns]
    first = tile.rows.start * cut.shape[1] + tile.columns.start
    drawn = uniform(first, part.shape, cut.shape[1], key, array_namespace(cut))
    return _groups(drawn, Tile(slice(None), slice(None), slice(None), tile.width))


def _in_units(rows: Array, size: int, by: Array, multiply: bool) -> Iterator[tuple[Tile, Array]]:
    """Yield each tile and its elements divided by `by` (with `multiply`, times it); the next tile overwrites them."""
    xp = array_namespace(rows)
    cut, tiles = _cut(rows, size)
    by, scratch = by.reshape(_per_group(cut, size)), _scratch(cut, size)
    for tile in tiles:
        part, factor = _groups(cut, tile), by[tile.rows, tile.groups][..., None]
        yield tile, (xp.multiply if multiply else xp.divide)(part, factor, out=scratch(part.shape))


# ------------------------------------------------------------------------------------------ codes


@unchecked
def encode_linear(
    rows: Array, size: int, by: Array, multiply: bool, zeros: Array | None, code: LinearCode, out: Array
) -> None:
    """Write packed linear codes of finite elements r to `out`: clip(round(r / S) + Z) + bias.

    `by` has the divisor of each group's elements, or with `multiply` their factor: finite, and not 0 as a divisor. Z is
    added after rounding if all `zeros` are integers, else before.
    """
    xp = array_namespace(rows)
    low, high, bias = np.float32(code.low), np.float32(code.high), code.bias
    cut, _ = _cut(rows, size)
    codes = (out if code.bits == 8 else xp.empty(rows.size, xp.uint8)).reshape(cut.shape)
    shift = None if zeros is None else zeros.reshape(_per_group(cut, size))
    integral = shift is None or bool((shift == xp.rint(shift)).all())
    for tile, t in _in_units(rows, size, by, multiply):
        here = None if shift is None else shift[tile.rows, tile.groups][..., None]
        if not integral:
            t += here
        t = _rounded(t, code.rounding, bias, _drawn(cut, tile, code.key))
        if shift is not None and integral:
            t += here
        xp.clip(t, low, high, out=t)
        if bias:
            t += np.float32(bias)
        into = _groups(codes, tile)
        (into.view(xp.int8) if low < 0 and not bias else into)[...] = t
    if code.bits < 8:
        pack(codes.reshape(-1), code.bits, out)


@unchecked
def encode_float(
    rows: Array, size: int, by: Array, multiply: bool, code: str, key: tuple[int, int] | None, out: Array
) -> None:
    """Write codes of small floats to `out`, a byte each: r / S to the nearest, or with `key` rounded stochastically.

    Ties go to even, large values saturate. `code` is a key of `MINIFLOATS`; other parameters as for `encode_linear`.
    """
    xp = array_namespace(rows)
    cut, _ = _cut(rows, size)
    codes = out.reshape(cut.shape)
    for tile, t in _in_units(rows, size, by, multiply):
        _groups(codes, tile)[...] = minifloat_bits(t, code, _drawn(cut, tile, key)).astype(xp.uint8)


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

    `thresholds` has shape (k,), or (rows, groups, k) for levels per group; other parameters as for `encode_linear`.
    """
    xp = array_namespace(rows)
    cut, _ = _cut(rows, size)
    codes = out.reshape(cut.shape)
    own = thresholds.ndim > 1
    limits = thresholds.reshape(*_per_group(cut, size), thresholds.shape[-1]) if own else thresholds
    for tile, t in _in_units(rows, size, by, multiply):
        count = xp.zeros(t.shape, xp.uint8)
        for k in range(thresholds.shape[-1]):
            count += t > (limits[tile.rows, tile.groups, k][..., None] if own else limits[k])
        _groups(codes, tile)[...] = count


def quantize_groups(
    rows: Array, size: int, rule: ScaleRule, code: Code, bits: int, gammas: Array | None, scales: Array, out: Array
) -> bool:
    """Write scales and packed codes in one pass, return True; False without such a kernel, or if a scale does not fit.

    The reference has none: the result is that of `absmax`, `quant.scaling.scales` and the codes. Elements need not be
    finite; rounding is not stochastic. `scales` has an item per group: float32, uint16 for halves, else a byte. Codes
    of 8 bits and their scales may be matrices with gaps between rows. `gammas`, float32, are parent scales, each for as
    many groups, in order, none of which is short.
    """
    return False


def _unpacked(packed: Array, bits: int, shape: tuple[int, ...]) -> Array:
    """Codes in bytes, in this shape."""
    if bits == 8:
        return packed.reshape(shape)
    codes = array_namespace(packed).empty(math.prod(shape), np.uint8)
    unpack(packed, bits, codes)
    return codes.reshape(shape)


@unchecked
def decode_linear(
    packed: Array, size: int, scales: Array, zeros: Array | None, code: LinearCode, out: Array, add: bool
) -> None:
    """Decode packed linear codes q to `out`, a matrix of rows: S (q - Z), or with `add` added to `out`.

    Codes of 8 bits may be a matrix with gaps between rows.
    """
    xp, bias = array_namespace(packed), code.bias
    target, tiles = _cut(out, size)
    shape = _per_group(target, size)
    codes, scales = _unpacked(packed, code.bits, target.shape), scales.reshape(shape)
    shift = None if zeros is None else zeros.reshape(shape)
    clamp = _may_overflow(scales, np.float32(256), 0.0 if shift is None else shift)
    scratch = _scratch(target, size)
    for tile in tiles:
        part, at = _groups(codes, tile), (tile.rows, tile.groups)
        into = _groups(target, tile)
        q = scratch(part.shape) if add else into
        q[...] = part.view(xp.int8) if code.signed and not bias else part
        if bias:
            q -= np.float32(bias)
        if shift is not None:
            q -= shift[at][..., None]
        q *= scales[at][..., None]
        if clamp:
            xp.clip(q, -GREATEST, GREATEST, out=q)
        if add:
            into += q


@unchecked
def decode_table(packed: Array, bits: int, size: int, scales: Array, levels: Array, out: Array, add: bool) -> None:
    """Decode packed codes q to `out`, a matrix of rows, by a table: S levels[q], or with `add` added to `out`.

    `levels` has shape (k,), or (rows, groups, k) for levels per group. Codes of 8 bits may be a matrix with gaps.
    """
    xp = array_namespace(packed)
    target, tiles = _cut(out, size)
    shape = _per_group(target, size)
    cut, scales = _unpacked(packed, bits, target.shape), scales.reshape(shape)
    own = None if levels.ndim == 1 else levels.reshape(*shape, levels.shape[-1])
    clamp = _may_overflow(scales, LARGEST_LEVEL)
    for tile in tiles:
        part, at = _groups(cut, tile).astype(xp.int64), (tile.rows, tile.groups)
        level = levels[part] if own is None else xp.take_along_axis(own[at], part, axis=-1)
        r = level * scales[at][..., None]
        if clamp:
            r = xp.where(abs(level) <= GREATEST, xp.clip(r, -GREATEST, GREATEST), r)
        into = _groups(target, tile)
        into[...] = into + r if add else r


def add_rows(
    codes: Array, size: int, scales: Array, levels: Array | None, y: Array, places: Array, weights: Array | None
) -> bool:
    """Add decoded rows of bytes, perhaps times weights (n, 1), to rows of y in one pass, return True; False without.

    The reference has none: the result is that of decoding, then y[places] += weights * rows. Bytes are int8, or numbers
    of `levels`. Codes and scales may be matrices with gaps between rows.
    """
    return False


def multiply_rows(
    codes: Array, size: int, scales: Array, levels: Array | None, x: Array, places: Array, products: Array
) -> bool:
    """Write the sums (n,) of rows of x times decoded rows of bytes in one pass; as `add_rows`."""
    return False


def _may_overflow(scales: Array, reach: np.float32, zeros: Array = 0.0) -> bool:
    """True if scales times values up to `reach` + |zeros| may round to infinity; always True on a device."""
    return not isinstance(scales, np.ndarray) or not bool((abs(scales) * (reach + abs(zeros)) <= GREATEST).all())


def surely_all(flags: Array) -> bool:
    """True if all flags are set; always False on a device, for which the host would have to wait."""
    return isinstance(flags, np.ndarray | np.generic) and bool(flags.all())


# ------------------------------------------------------------------------------------------ packing


def pack(codes: Array, bits: int, out: Array) -> None:
    """Pack codes of 1 to 7 bits, one per byte, densely into `out`, in the format of `quant.packing`."""
    xp = array_namespace(codes)
    for words, planes in _blocks(codes, bits, out):
        shift = 0
        for power in POWERS[bits]:
            fields = ((words >> shift) & _every_byte(power)).reshape(-1, 8 // power, power)
            plane = fields[:, 0]
            for k in range(1, 8 // power):
                plane |= fields[:, k] << (k * power)
            planes[:, 4 * shift : 4 * (shift + power)] = xp.ascontiguousarray(plane).view(xp.uint8)
            shift += power
    if rest := len(codes) % BLOCK:
        fields = (codes[-rest:, None] >> xp.arange(bits, dtype=xp.uint8)) & 1
        out[-packed_nbytes(rest, bits) :] = xp.packbits(fields, bitorder="little")


def unpack(packed: Array, bits: int, out: Array) -> None:
    """Unpack codes that `pack` packed, one per byte, into `out`: uint8, shape (n,)."""
    xp = array_namespace(packed)
    for words, planes in _blocks(out, bits, packed):
        shift = 0
        for power in POWERS[bits]:
            plane = _words(planes[:, 4 * shift : 4 * (shift + power)])
            fields = words.reshape(-1, 8 // power, power)
            for k in range(8 // power):
                field = ((plane >> (k * power)) & _every_byte(power)) << shift
                fields[:, k] = fields[:, k] | field if shift else field
            shift += power
    if rest := len(out) % BLOCK:
        stream = xp.unpackbits(packed[-packed_nbytes(rest, bits) :], bitorder="little")[: rest * bits]
        out[-rest:] = (stream.reshape(rest, bits) << xp.arange(bits, dtype=xp.uint8)).sum(axis=1)


def _blocks(codes: Array, bits: int, packed: Array) -> Iterator[tuple[Array, Array]]:
    """Yield batches of whole 32-code blocks: views of the codes, 8 words of uint32 each, and of their packed bytes."""
    xp, blocks = array_namespace(codes), len(codes) // BLOCK
    step = TILE // BLOCK if xp is np else max(blocks, 1)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        words = codes[first * BLOCK : last * BLOCK].view(xp.uint32).reshape(-1, BLOCK // 4)
        yield words, packed[first * 4 * bits : last * 4 * bits].reshape(-1, 4 * bits)


def _words(rows: Array) -> Array:
    """Rows of bytes as uint32; on a GPU a copy, as it cannot read words at addresses that are no multiple of 4."""
    xp = array_namespace(rows)
    return (xp.ascontiguousarray(rows) if xp is np else rows.copy()).view(xp.uint32)


def _every_byte(power: int) -> np.uint32:
    """uint32 word whose bytes each have the lowest `power` bits set."""
    return np.uint32((2**power - 1) * 0x01010101)
