"""What every kernel does, in NumPy's words, which are CuPy's too; on the host in tiles that stay in the cache.

Elements come as `lines`, a C-contiguous matrix of float32, in groups of `size` along each line, the last of which may
be shorter; per group there is one entry of arrays of shape (lines, groups of a line). Codes before packing are bytes in
the matrix's order: q plus a bias below 8 bits, int8 as it is stored for 8 bits, the bits of a small float, or a level's
number.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from quant.formats import MINIFLOATS
from quant.packing import BLOCK, POWERS, packed_nbytes

Array = Any
Tile = tuple[slice, slice, slice, int]

TILE = 1 << 16
"""Elements of a tile: with its temporaries it stays within a core's cache."""

MAGNITUDE = 0x7FFFFFFF
EXPONENT = 23


def array_namespace(x: Array) -> ModuleType:
    """The module whose functions work on `x`: NumPy, or CuPy for arrays of its own."""
    return np if isinstance(x, np.ndarray | np.generic) else sys.modules["cupy"]


def _tiles(shape: tuple[int, int], size: int, most: int) -> Iterator[Tile]:
    """Rows, columns, groups of a line, and elements of a group (or of the piece of one that is larger than a tile)."""
    lines, length = shape
    whole = length - length % size
    for first, last, width in ((0, whole, size), (whole, length, length - whole)):
        step = min(width, most) if width > most else max(min(last - first, most) // max(width, 1), 1) * width
        if first == last or not lines:
            continue
        for start in range(first, last, size) if width > most else (first,):
            stop = min(start + size, last) if width > most else last
            down = max(most // step, 1)
            for row in range(0, lines, down):
                for column in range(start, stop, step):
                    end = min(column + step, stop)
                    groups = slice(column // size, (end - 1) // size + 1)
                    yield slice(row, row + down), slice(column, end), groups, min(width, end - column)


def _cut(lines: Array, size: int) -> tuple[Array, Iterator[Tile]]:
    """The matrix, as one line where no group is short, and its tiles: one for a device, which has no such cache."""
    if lines.shape[1] % size == 0:
        lines = lines.reshape(1, -1)
    return lines, _tiles(lines.shape, size, TILE if isinstance(lines, np.ndarray) else max(lines.size, size))


def _groups(lines: Array, tile: Tile) -> Array:
    """What a tile covers, as (rows, groups, elements of a group)."""
    rows, columns, _, width = tile
    part = lines[rows, columns]
    return part.reshape(part.shape[0], part.shape[1] // width, width)


def _desk(lines: Array, size: int, dtype: Any = np.float32) -> Any:
    """Where tiles are worked on: shape -> array, the same memory for all of a call, so that it stays in the cache."""
    xp = array_namespace(lines)
    space = xp.empty(min(lines.size, TILE) if xp is np else lines.size, dtype)

    def take(shape: tuple[int, ...]) -> Array:
        return space[: math.prod(shape)].reshape(shape)

    return take


def _per_group(lines: Array, size: int) -> tuple[int, int]:
    return lines.shape[0], -(-lines.shape[1] // size)


# ------------------------------------------------------------------------------------------ ranges of groups


def absmax(lines: Array, size: int) -> Array:
    """The largest |r| of every group: float32, shape (lines, groups); not finite where an element is not.

    The bits of |r| as integers are in the order of |r|, NaN above all: so nothing gets lost, in any order.
    """
    xp = array_namespace(lines)
    shape = _per_group(lines, size)
    cut, tiles = _cut(lines, size)
    largest = xp.zeros(_per_group(cut, size), xp.int32)
    desk = _desk(cut, size, np.int32)
    for tile in tiles:
        part = _groups(cut, tile).view(xp.int32)
        found = xp.bitwise_and(part, MAGNITUDE, out=desk(part.shape)).max(axis=-1)
        into = largest[tile[0], tile[2]]
        into[...] = xp.maximum(into, found)
    return largest.view(xp.float32).reshape(shape)


def minmax(lines: Array, size: int) -> tuple[Array, Array]:
    """The smallest and the largest element of every group; not finite, one of them, where an element is not."""
    xp = array_namespace(lines)
    shape = _per_group(lines, size)
    cut, tiles = _cut(lines, size)
    low = xp.full(_per_group(cut, size), np.inf, xp.float32)
    high = xp.full(_per_group(cut, size), -np.inf, xp.float32)
    for tile in tiles:
        part, at = _groups(cut, tile), (tile[0], tile[2])
        low[at] = xp.minimum(low[at], part.min(axis=-1))
        high[at] = xp.maximum(high[at], part.max(axis=-1))
    return low.reshape(shape), high.reshape(shape)


def peak(lines: Array, size: int) -> Array:
    """The element of every group that is largest in size, with its sign; of equal ones the first."""
    xp = array_namespace(lines)
    shape = _per_group(lines, size)
    cut, tiles = _cut(lines, size)
    found = cut[:, ::size].copy()
    for tile in tiles:
        part, at = _groups(cut, tile), (tile[0], tile[2])
        which = (part.view(xp.int32) & MAGNITUDE).argmax(axis=-1)
        here = xp.take_along_axis(part, which[..., None], axis=-1)[..., 0]
        found[at] = xp.where(
            (here.view(xp.int32) & MAGNITUDE) > (found[at].copy().view(xp.int32) & MAGNITUDE), here, found[at]
        )
    return found.reshape(shape)


# ------------------------------------------------------------------------------------------ rounding


def uniform(first: int, shape: tuple[int, ...], stride: int, key: tuple[int, int], xp: ModuleType = np) -> Array:
    """Numbers from 0 to below 1, a function of each element's number and the key: float32 with 24 digits.

    Two rounds of the finaliser of MurmurHash3 (A. Appleby, public domain), one for either half of the number.

    Parameters
    ----------
    first : int
        Number of the first element.
    shape : (rows, columns)
    stride : int
        What the number grows by from row to row.
    key : two int below 2^32
    """
    rows, columns = (xp.arange(n, dtype=xp.uint64) for n in shape)
    number = (rows * np.uint64(stride))[:, None] + columns[None] + np.uint64(first)
    low, high = (number & 0xFFFFFFFF).astype(xp.uint32), (number >> 32).astype(xp.uint32)
    word = _mixed(_mixed(low ^ np.uint32(key[0])) + high * np.uint32(0x9E3779B9) + np.uint32(key[1]))
    return (word >> 8).astype(xp.float32) * np.float32(2**-24)


def _mixed(word: Array) -> Array:
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _rounded(t: Array, rounding: str, bias: float, drawn: Array | None) -> Array:
    """t, rounded in place; `half_up` adds the bias before, as ggml does, so that the sum's own rounding is the same."""
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
    """What stochastic rounding adds to a tile."""
    if key is None:
        return None
    rows, columns, _, _ = tile
    part = cut[rows, columns]
    first = rows.start * cut.shape[1] + columns.start
    drawn = uniform(first, part.shape, cut.shape[1], key, array_namespace(cut))
    return _groups(drawn, (slice(None), slice(None), slice(None), tile[3]))


def _scaled(cut: Array, tile: Tile, by: Array, multiply: bool, desk: Any) -> Array:
    """A tile of the elements in units of their scale."""
    xp = array_namespace(cut)
    part, factor = _groups(cut, tile), by[tile[0], tile[2]][..., None]
    return (xp.multiply if multiply else xp.divide)(part, factor, out=desk(part.shape))


# ------------------------------------------------------------------------------------------ codes


def encode_linear(
    lines: Array,
    size: int,
    by: Array,
    multiply: bool,
    zeros: Array | None,
    limits: tuple[int, int],
    bias: int,
    rounding: str,
    key: tuple[int, int] | None,
    bits: int,
    out: Array,
) -> None:
    """q = clip(round(r / S) + Z), plus the bias; packed.

    Parameters
    ----------
    lines : array of float32, shape (lines, length)
        Finite.
    size : int
        Of a group.
    by : array of float32, shape (lines, groups)
        What elements are divided by, or with `multiply` multiplied with. Finite, and not 0 as a divisor.
    zeros : array of float32, shape (lines, groups), or None
        Z, integral; where it is not, it is added before rounding.
    limits : two int
        Of q.
    bias : int
        Added to q in the end.
    rounding : str
        As in `QuantSpec`.
    key : two int, or None
        For stochastic rounding.
    bits : int
        Of a code.
    out : array of uint8, shape (packed_nbytes(elements, bits),)
    """
    xp = array_namespace(lines)
    low, high = map(np.float32, limits)
    cut, tiles = _cut(lines, size)
    shape = _per_group(cut, size)
    codes = (out if bits == 8 else xp.empty(lines.size, xp.uint8)).reshape(cut.shape)
    by = by.reshape(shape)
    shift = None if zeros is None else zeros.reshape(shape)
    integral = shift is None or bool((shift == xp.rint(shift)).all())
    desk = _desk(cut, size)
    with np.errstate(over="ignore", invalid="ignore"):
        for tile in tiles:
            t = _scaled(cut, tile, by, multiply, desk)
            here = None if shift is None else shift[tile[0], tile[2]][..., None]
            if not integral:
                t += here
            t = _rounded(t, rounding, bias, _drawn(cut, tile, key))
            if shift is not None and integral:
                t += here
            xp.clip(t, low, high, out=t)
            if bias:
                t += np.float32(bias)
            into = _groups(codes, tile)
            (into.view(xp.int8) if low < 0 and not bias else into)[...] = t
    if bits < 8:
        pack(codes.reshape(-1), bits, out)


def encode_float(
    lines: Array, size: int, by: Array, multiply: bool, code: str, key: tuple[int, int] | None, out: Array
) -> None:
    """The small float that is nearest to r / S, of two equally near the even one; the largest for what is beyond.

    `code` is a name in `quant.formats.MINIFLOATS`; `out` has a byte for
    every code; all else as for `encode_linear`.
    """
    xp = array_namespace(lines)
    cut, tiles = _cut(lines, size)
    by, codes = by.reshape(_per_group(cut, size)), out.reshape(cut.shape)
    desk = _desk(cut, size)
    with np.errstate(over="ignore", invalid="ignore"):
        for tile in tiles:
            t = _scaled(cut, tile, by, multiply, desk)
            _groups(codes, tile)[...] = minifloat_bits(t, code, _drawn(cut, tile, key)).astype(xp.uint8)


def minifloat_bits(t: Array, code: str, drawn: Array | None = None) -> Array:
    """The bits of a format for float32 values, rounded to nearest even, or up where `drawn` says so: int32.

    In units of the last place that its exponent has, a number is an integer n; and exponents follow each other so that
    the bits are (exponent 2^mantissa) + n, whether n spills over into the next exponent or not.
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


def encode_table(lines: Array, size: int, by: Array, multiply: bool, thresholds: Array, out: Array) -> None:
    """How many thresholds r / S is above.

    `thresholds` has shape (k,), or (lines, groups, k) for levels of every group's own; `out` has a byte for every code;
    all else as for `encode_linear`.
    """
    xp = array_namespace(lines)
    cut, tiles = _cut(lines, size)
    shape = _per_group(cut, size)
    by, codes = by.reshape(shape), out.reshape(cut.shape)
    above = thresholds if thresholds.ndim == 1 else thresholds.reshape(*shape, thresholds.shape[-1])
    desk = _desk(cut, size)
    with np.errstate(over="ignore", invalid="ignore"):
        for tile in tiles:
            t = _scaled(cut, tile, by, multiply, desk)
            count = xp.zeros(t.shape, xp.uint8)
            for k in range(thresholds.shape[-1]):
                limit = above[k] if above.ndim == 1 else above[tile[0], tile[2], k][..., None]
                count += t > limit
            _groups(codes, tile)[...] = count


def quantize_linear(
    lines: Array,
    size: int,
    steps: float,
    form: str,
    limits: tuple[int, int],
    bias: int,
    bits: int,
    rounding: str,
    inverse: bool,
    peak: bool,
    scales: Array,
    out: Array,
) -> bool:
    """Ranges, scales and codes of all groups at once, if there is a kernel for that and nothing in the way; else False.

    There is none here: what it comes to is `absmax`, the arithmetic of `quant.scaling.scales`, and `encode_linear`.

    Parameters
    ----------
    lines, size, limits, bias, bits, rounding, out
        As for `encode_linear`, but not stochastic; elements need not be finite: if one is not, the answer is False.
    steps : float
        The scale is the largest |r| divided by this.
    form : str
        fp32, fp16 or bf16, in which the scale is kept. If one does not fit, the answer is False.
    inverse : bool
        Whether codes are r times the inverse of the scale as it was before it was rounded to its form, not r divided by
        what is kept of it.
    peak : bool
        Whether the scale has the sign of the element that is farthest from 0, over that of `steps`.
    scales : array of float32, or uint16 for the bits of halves; shape (lines * groups,)
        Where to put them.
    """
    return False


def decode_linear(
    packed: Array,
    size: int,
    scales: Array,
    zeros: Array | None,
    bits: int,
    bias: int,
    signed: bool,
    out: Array,
    add: bool,
) -> None:
    """S (q - Z), or with `add` the same on top of what `out` holds.

    Parameters
    ----------
    packed : array of uint8, shape (packed_nbytes(elements, bits),)
    size : int
        Of a group.
    scales : array of float32, shape (lines, groups)
    zeros : array of float32, shape (lines, groups), or None
    bits, bias : int
        Of a code, and taken off it.
    signed : bool
        Whether codes without a bias are int8.
    out : array of float32, shape (lines, length)
    add : bool
    """
    xp = array_namespace(packed)
    target, tiles = _cut(out, size)
    shape = _per_group(target, size)
    codes = packed if bits == 8 else xp.empty(out.size, xp.uint8)
    if bits < 8:
        unpack(packed, bits, codes)
    codes, scales = codes.reshape(target.shape), scales.reshape(shape)
    shift = None if zeros is None else zeros.reshape(shape)
    desk = _desk(target, size)
    with np.errstate(over="ignore", invalid="ignore"):
        for tile in tiles:
            part, at = _groups(codes, tile), (tile[0], tile[2])
            into = _groups(target, tile)
            q = desk(part.shape) if add else into
            q[...] = part.view(xp.int8) if signed and not bias else part
            if bias:
                q -= np.float32(bias)
            if shift is not None:
                q -= shift[at][..., None]
            q *= scales[at][..., None]
            if add:
                into += q


def decode_table(codes: Array, size: int, scales: Array, levels: Array, out: Array, add: bool) -> None:
    """S levels[q], or with `add` the same on top of what `out` holds.

    `codes` has shape (lines, length), a byte for each; `levels` has shape (k,), or (lines, groups, k) for levels of
    every group's own; all else as for `decode_linear`.
    """
    xp = array_namespace(codes)
    cut, tiles = _cut(codes, size)
    shape = _per_group(cut, size)
    scales, target = scales.reshape(shape), out.reshape(cut.shape)
    own = None if levels.ndim == 1 else levels.reshape(*shape, levels.shape[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        for tile in tiles:
            part, at = _groups(cut, tile).astype(xp.int64), (tile[0], tile[2])
            r = levels[part] if own is None else xp.take_along_axis(own[at], part, axis=-1)
            r = r * scales[at][..., None]
            into = _groups(target, tile)
            into[...] = into + r if add else r


# ------------------------------------------------------------------------------------------ packing


def pack(codes: Array, bits: int, out: Array) -> None:
    """Codes below 2^bits, one to a byte, into dense bytes; `quant.packing` says how they lie.

    Parameters
    ----------
    codes : array of uint8, shape (n,)
    bits : int
        1 to 7.
    out : array of uint8, shape (packed_nbytes(n, bits),)
    """
    xp = array_namespace(codes)
    blocks = len(codes) // BLOCK
    step = TILE // BLOCK if xp is np else max(blocks, 1)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        words = codes[first * BLOCK : last * BLOCK].view(xp.uint32).reshape(last - first, BLOCK // 4)
        planes = out[first * 4 * bits : last * 4 * bits].reshape(last - first, 4 * bits)
        shift = place = 0
        for power in POWERS[bits]:
            plane = xp.empty((last - first, power), xp.uint32)
            for j in range(power):
                gathered = (words[:, j] >> shift) & _every_byte(power)
                for k in range(1, 8 // power):
                    gathered |= ((words[:, k * power + j] >> shift) & _every_byte(power)) << (k * power)
                plane[:, j] = gathered
            planes[:, place : place + 4 * power] = plane.view(xp.uint8)
            place, shift = place + 4 * power, shift + power
    rest = codes[blocks * BLOCK :]
    if len(rest):
        out[blocks * 4 * bits :] = _tail_packing(len(rest), bits, xp)(rest)


def unpack(packed: Array, bits: int, out: Array) -> None:
    """What `pack` packed, back into `out`: array of uint8, shape (n,)."""
    xp = array_namespace(packed)
    blocks = len(out) // BLOCK
    step = TILE // BLOCK if xp is np else max(blocks, 1)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        planes = packed[first * 4 * bits : last * 4 * bits].reshape(last - first, 4 * bits)
        words = out[first * BLOCK : last * BLOCK].view(xp.uint32).reshape(last - first, BLOCK // 4)
        shift = place = 0
        for power in POWERS[bits]:
            plane = xp.ascontiguousarray(planes[:, place : place + 4 * power]).view(xp.uint32)
            for j in range(power):
                for k in range(8 // power):
                    field = ((plane[:, j] >> (k * power)) & _every_byte(power)) << shift
                    words[:, k * power + j] = words[:, k * power + j] | field if shift else field
            place, shift = place + 4 * power, shift + power
    rest = out[blocks * BLOCK :]
    if len(rest):
        rest[...] = _tail_unpacking(len(rest), bits, xp)(packed[blocks * 4 * bits :])


def _every_byte(power: int) -> np.uint32:
    """A word in each of whose bytes the lowest `power` bits are set."""
    return np.uint32((2**power - 1) * 0x01010101)


@cache
def _places(count: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """For each bit of a stream: whose code's it is, and which of that code."""
    stream = np.arange(count * bits)
    return stream // bits, (stream % bits).astype(np.uint8)


def _tail_packing(count: int, bits: int, xp: ModuleType) -> Any:
    """From up to 31 codes to a stream of bits."""
    whose, which = map(xp.asarray, _places(count, bits))
    nbytes = packed_nbytes(count, bits)

    def packing(codes: Array) -> Array:
        stream = xp.zeros(8 * nbytes, xp.uint8)
        stream[: count * bits] = (codes[whose] >> which) & 1
        return (stream.reshape(nbytes, 8) << xp.arange(8, dtype=xp.uint8)).sum(axis=1).astype(xp.uint8)

    return packing


def _tail_unpacking(count: int, bits: int, xp: ModuleType) -> Any:
    """And back."""

    def unpacking(packed: Array) -> Array:
        stream = (packed[:, None] >> xp.arange(8, dtype=xp.uint8)) & 1
        fields = stream.reshape(-1)[: count * bits].reshape(count, bits)
        return (fields << xp.arange(bits, dtype=xp.uint8)).sum(axis=1).astype(xp.uint8)

    return unpacking
