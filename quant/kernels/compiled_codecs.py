"""Kernels as loops that numba compiles: one pass where NumPy takes several. The same bits as `reference` gives.

Of every group, one loop finds the largest and another converts: apart, both become vectors. Nothing is reordered or
fused that has to be rounded; the largest of floats is found among their bits, as integers. Each function is compiled
when it is first called, and kept on disk for the next process where there is a place to keep it.
"""

# mypy: ignore-errors
# What numba makes of these functions has other types than Python sees.

from __future__ import annotations

import math
from functools import cache, wraps

import numpy as np
from numba import njit

from quant.formats import MINIFLOATS
from quant.kernels import reference_codecs as reference
from quant.packing import BLOCK, POWERS
from quant.spec.quant_spec import ROUNDINGS

F, I, U, B = np.float32, np.int32, np.uint32, np.uint8
MAGNITUDE, ALL = I(0x7FFFFFFF), I(31)
ZERO, HALF, ONE = F(0), F(0.5), F(1)
TINY, INFINITE, GREATEST = F(2**-149), I(0x7F800000), np.finfo(F).max
ANY, ANY32 = np.uint64(0), U(0)
NIBBLES = BLOCK // 2
NEAR = 1 << 13
"""Elements that are still in the nearest cache when they are needed again."""

KERNELS = {}
"""By name, those of `reference` that are here too."""


def loop(function):
    """A compiled loop, of operations as they are written."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        return njit(**options)(function)


inlined = njit(error_model="numpy", forceinline=True)


def kernel(function):
    """A form of the reference of that name."""
    KERNELS[function.__name__] = wraps(getattr(reference, function.__name__))(function)
    return KERNELS[function.__name__]


def _shaped(lines, size):
    """(matrix, elements of a group): one line where no group is short."""
    return lines.reshape(1, -1) if lines.shape[1] % size == 0 else lines


# ------------------------------------------------------------------------------------------ ranges of groups


@inlined
def _ordered(bits):
    """Integers in the order of the floats that have these bits; and back."""
    return bits ^ ((bits >> ALL) & MAGNITUDE)


@loop
def _absmax(bits, size, out):
    lines, length = bits.shape
    for line in range(lines):
        for group in range(out.shape[1]):
            part = bits[line, group * size : min((group + 1) * size, length)]
            largest = I(0)
            for i in range(part.size):
                largest = max(largest, part[i] & MAGNITUDE)
            out[line, group] = largest


@kernel
def absmax(lines, size):
    found = np.empty((lines.shape[0], -(-lines.shape[1] // size)), np.float32)
    cut = _shaped(lines, size)
    _absmax(cut.view(np.int32), size, found.view(np.int32).reshape(cut.shape[0], -1))
    return found


@loop
def _minmax(bits, size, low, high):
    lines, length = bits.shape
    for line in range(lines):
        for group in range(low.shape[1]):
            part = bits[line, group * size : min((group + 1) * size, length)]
            least = largest = _ordered(part[0])
            for i in range(part.size):
                here = _ordered(part[i])
                least = min(least, here)
                largest = max(largest, here)
            low[line, group], high[line, group] = _ordered(least), _ordered(largest)


@kernel
def minmax(lines, size):
    shape = lines.shape[0], -(-lines.shape[1] // size)
    low, high = np.empty(shape, np.float32), np.empty(shape, np.float32)
    cut = _shaped(lines, size)
    flat = cut.shape[0], low.size // max(cut.shape[0], 1)
    _minmax(cut.view(np.int32), size, low.view(np.int32).reshape(flat), high.view(np.int32).reshape(flat))
    return low, high


@inlined
def _farthest(bits):
    """The number that is farthest from 0, the first of those, as bits."""
    least = largest = _ordered(bits[0])
    for i in range(bits.size):
        here = _ordered(bits[i])
        least = min(least, here)
        largest = max(largest, here)
    low, high = I(_ordered(least)), I(_ordered(largest))
    below, above = low & MAGNITUDE, high & MAGNITUDE
    i = 0
    while below == above and (bits[i] & MAGNITUDE) != above:  # which comes first?
        i += 1
    return bits[i] if below == above else (high if above > below else low)


@loop
def _peak(bits, size, out):
    lines, length = bits.shape
    for line in range(lines):
        for group in range(out.shape[1]):
            out[line, group] = _farthest(bits[line, group * size : min((group + 1) * size, length)])


@kernel
def peak(lines, size):
    found = np.empty((lines.shape[0], -(-lines.shape[1] // size)), np.float32)
    cut = _shaped(lines, size)
    _peak(cut.view(np.int32), size, found.view(np.int32).reshape(cut.shape[0], -1))
    return found


# ------------------------------------------------------------------------------------------ linear codes

NEAREST_EVEN, HALF_AWAY, HALF_UP, STOCHASTIC = range(len(ROUNDINGS))


PLAIN, AFTER, BEFORE = range(3)
"""Is there no zero point, is it added after rounding, or before?"""


@inlined
def _mixed(word):
    word = U(word ^ (word >> U(16))) * U(0x85EBCA6B)
    word = U(word ^ U(U(word) >> U(13))) * U(0xC2B2AE35)
    return U(U(word) ^ U(U(word) >> U(16)))


@inlined
def _uniform(number, key0, key1):
    """As `reference.uniform`."""
    low, high = U(number & np.uint64(0xFFFFFFFF)), U(number >> np.uint64(32))
    word = _mixed(U(_mixed(U(low ^ key0)) + U(high * U(0x9E3779B9)) + key1))
    return F(I(word >> U(8))) * F(2**-24)


@cache
def _coder(rounding, multiply, shift):
    """The code of an element as a byte; what is the same for all elements is a constant in it."""

    @inlined
    def code(r, by, zero, low, high, bias, number, key0, key1):
        t = F(r * by) if multiply else F(r / by)
        if shift == BEFORE:
            t = F(t + zero)
        if rounding == HALF_AWAY:
            size = abs(t)
            down = np.floor(size)
            t = math.copysign(F(down + (ONE if F(size - down) >= HALF else ZERO)), t)
        elif rounding == HALF_UP:
            t = F(np.floor(F(t + F(bias + HALF))) - bias)
        elif rounding == STOCHASTIC:
            t = np.floor(F(t + _uniform(number, key0, key1)))
        else:
            t = np.rint(t)
        if shift == AFTER:
            t = F(t + zero)
        t = low if t < low else t
        t = high if t > high else t
        return B(I(F(t + bias)))

    return code


@cache
def _bytes_encoder(rounding, multiply, shift):
    code = _coder(rounding, multiply, shift)

    def encode(lines, size, by, zeros, low, high, bias, key0, key1, out):
        rows, length = lines.shape
        for line in range(rows):
            for group in range(by.shape[1]):
                first, last = group * size, min((group + 1) * size, length)
                part, into = lines[line, first:last], out[line, first:last]
                here, zero = by[line, group], zeros[line, group] if shift != PLAIN else ZERO
                number = np.uint64(line * length + first)
                for i in range(part.size):
                    into[i] = code(part[i], here, zero, low, high, bias, np.uint64(number + np.uint64(i)), key0, key1)

    return loop(encode)


@cache
def _nibbles_encoder(rounding, multiply, shift):
    """Codes of four bits, packed at once, where groups are whole blocks."""
    code = _coder(rounding, multiply, shift)

    def encode(lines, size, by, zeros, low, high, bias, key0, key1, out):
        flat = lines.reshape(-1)
        for group in range(by.size):
            here, zero = by[group], zeros[group] if shift != PLAIN else ZERO
            for first in range(group * size, (group + 1) * size, BLOCK):
                part, into = flat[first : first + BLOCK], out[first // 2 : first // 2 + NIBBLES]
                number = np.uint64(first)
                for i in range(NIBBLES):
                    other = np.uint64(i + NIBBLES)
                    a = code(part[i], here, zero, low, high, bias, np.uint64(number + np.uint64(i)), key0, key1)
                    b = code(part[i + NIBBLES], here, zero, low, high, bias, np.uint64(number + other), key0, key1)
                    into[i] = B(a | B(b << B(4)))

    return loop(encode)


@kernel
def encode_linear(lines, size, by, multiply, zeros, limits, bias, rounding, key, bits, out):
    shift = PLAIN
    if zeros is not None:
        shift = AFTER if (zeros == np.rint(zeros)).all() else BEFORE
    keys = (U(0), U(0)) if key is None else (U(key[0]), U(key[1]))
    kind = ROUNDINGS.index(rounding), bool(multiply), shift
    limits = F(limits[0]), F(limits[1]), F(bias)
    cut = _shaped(lines, size)
    whole = bits == 4 and size % BLOCK == 0 and cut.shape[1] % size == 0
    if whole:
        shifts = by.reshape(-1) if zeros is None else zeros.reshape(-1)
        _nibbles_encoder(*kind)(cut, size, by.reshape(-1), shifts, *limits, *keys, out)
        return
    shape = cut.shape[0], by.size // max(cut.shape[0], 1)
    shifts = (by if zeros is None else zeros).reshape(shape)
    codes = out if bits == 8 else np.empty(lines.size, np.uint8)
    _bytes_encoder(*kind)(cut, size, by.reshape(shape), shifts, *limits, *keys, codes.reshape(cut.shape))
    if bits < 8:
        pack(codes, bits, out)


@inlined
def _half(scale, keep):
    """(bits, value) of the half-precision number nearest to one from 0 on; with `keep`, the smallest instead of 0."""
    exponent = I(max(I(F(scale).view(np.int32) >> I(23)), I(113)))
    unit = I(I(exponent - I(10)) << I(23)).view(np.float32)
    n = np.rint(F(scale / unit))
    n = ONE if keep and n == ZERO and scale > ZERO else n
    return I(I(I(exponent - I(113)) << I(10)) + I(n)), F(n * unit)


@inlined
def _bfloat(scale, keep):
    """The same for bfloat16."""
    bits = I(F(scale).view(np.int32))
    raw = I(I(bits + I(I(0x7FFF) + I(I(bits >> I(16)) & I(1)))) >> I(16))
    raw = I(1) if keep and raw == I(0) and scale > ZERO else raw
    return raw, I(raw << I(16)).view(np.float32)


@cache
def _shortcut(form, nibbles, rounding, inverse, peak):
    """Ranges, scales and codes of a few groups after each other, so that their elements are read while in the cache."""
    code = _coder(rounding, inverse, PLAIN)
    half, brain = form == "fp16", form == "bf16"
    infinite = I(0x7C00) if half else (I(0x7F80) if brain else I(0x7F800000))
    sign = 31 if form == "fp32" else 15

    def quantize(lines, size, steps, low, high, bias, scales, out):
        worst = I(0)
        size_of_steps = abs(steps)
        rows, length = lines.shape
        batch = max(NEAR // size, 1)
        largest, by = np.empty(batch, np.int32), np.empty(batch, np.float32)
        for line in range(rows):
            for start in range(0, scales.shape[1], batch):
                groups = min(batch, scales.shape[1] - start)
                for group in range(groups):
                    first, last = (start + group) * size, min((start + group + 1) * size, length)
                    bits = lines[line, first:last].view(np.int32)
                    if peak:
                        largest[group] = _farthest(bits)
                    else:
                        most = I(0)
                        for i in range(bits.size):
                            most = max(most, bits[i] & MAGNITUDE)
                        largest[group] = most
                for group in range(groups):
                    most = I(largest[group] & MAGNITUDE)
                    scale = F(most.view(np.float32) / size_of_steps)
                    scale = TINY if scale == ZERO and most > 0 else scale
                    raw, kept = I(F(scale).view(np.int32)), scale
                    if half:
                        raw, kept = _half(scale, not inverse)
                    if brain:
                        raw, kept = _bfloat(scale, not inverse)
                    worst = max(worst, raw if most < INFINITE else infinite)
                    down = peak and (largest[group] < 0) != (steps < 0)
                    scales[line, start + group] = I(raw | I(I(1) << I(sign))) if down else raw
                    kept = F(-kept) if down else kept
                    scale = F(-scale) if down else scale
                    if inverse:
                        by[group] = ZERO if scale == ZERO else F(max(min(F(ONE / scale), GREATEST), -GREATEST))
                    else:
                        by[group] = ONE if kept == ZERO else kept
                for group in range(groups):
                    first, last = (start + group) * size, min((start + group + 1) * size, length)
                    here = by[group]
                    if nibbles:
                        for at in range(first, last, BLOCK):
                            part, into = lines[line, at : at + BLOCK], out[line, at // 2 : at // 2 + NIBBLES]
                            for i in range(NIBBLES):
                                a = code(part[i], here, ZERO, low, high, bias, ANY, ANY32, ANY32)
                                b = code(part[i + NIBBLES], here, ZERO, low, high, bias, ANY, ANY32, ANY32)
                                into[i] = B(a | B(b << B(4)))
                    else:
                        part, into = lines[line, first:last], out[line, first:last]
                        for i in range(part.size):
                            into[i] = code(part[i], here, ZERO, low, high, bias, ANY, ANY32, ANY32)
        return worst < infinite

    return loop(quantize)


@kernel
def quantize_linear(lines, size, steps, form, limits, bias, bits, rounding, inverse, peak, scales, out):
    cut = _shaped(lines, size)
    whole = bits == 4 and size % BLOCK == 0 and cut.shape[1] % size == 0
    items = scales.view(np.int32 if form == "fp32" else np.uint16).reshape(cut.shape[0], -1)
    codes = out if whole or bits == 8 else np.empty(lines.size, np.uint8)
    limits = F(limits[0]), F(limits[1]), F(bias)
    loop_of_kind = _shortcut(form, whole, ROUNDINGS.index(rounding), inverse, peak)
    if not loop_of_kind(cut, size, F(steps), *limits, items, codes.reshape(cut.shape[0], -1)):
        return False
    if codes is not out:
        pack(codes, bits, out)
    return True


@cache
def _bytes_decoder(signed, shifted, add):
    def decode(codes, size, scales, zeros, bias, out):
        rows, length = codes.shape
        for line in range(rows):
            for group in range(scales.shape[1]):
                first, last = group * size, min((group + 1) * size, length)
                part, into = codes[line, first:last], out[line, first:last]
                scale, zero = scales[line, group], zeros[line, group] if shifted else ZERO
                for i in range(part.size):
                    q = F(np.int8(part[i])) if signed else F(I(I(part[i]) - bias))
                    if shifted:
                        q = F(q - zero)
                    r = F(q * scale)
                    into[i] = F(into[i] + r) if add else r

    return loop(decode)


@cache
def _nibbles_decoder(shifted, add):
    def decode(packed, size, scales, zeros, bias, out):
        for group in range(scales.size):
            scale, zero = scales[group], zeros[group] if shifted else ZERO
            for first in range(group * size, (group + 1) * size, BLOCK):
                part = packed[first // 2 : first // 2 + NIBBLES]
                lower, upper = out[first : first + NIBBLES], out[first + NIBBLES : first + BLOCK]
                for i in range(NIBBLES if add else part.size):  # so LLVM makes vectors of both
                    both = I(part[i])
                    a, b = F(I(I(both & I(15)) - bias)), F(I(I(both >> I(4)) - bias))
                    if shifted:
                        a, b = F(a - zero), F(b - zero)
                    a, b = F(a * scale), F(b * scale)
                    lower[i] = F(lower[i] + a) if add else a
                    upper[i] = F(upper[i] + b) if add else b

    return loop(decode)


@kernel
def decode_linear(packed, size, scales, zeros, bits, bias, signed, out, add):
    target = _shaped(out, size)
    shifts = scales if zeros is None else zeros
    shifted = zeros is not None
    if bits == 4 and size % BLOCK == 0 and target.shape[1] % size == 0:
        decode = _nibbles_decoder(shifted, bool(add))
        decode(packed, size, scales.reshape(-1), shifts.reshape(-1), I(bias), target.reshape(-1))
        return
    codes = packed
    if bits < 8:
        codes = np.empty(out.size, np.uint8)
        unpack(packed, bits, codes)
    shape = target.shape[0], scales.size // max(target.shape[0], 1)
    decode = _bytes_decoder(bool(signed and not bias), shifted, bool(add))
    decode(codes.reshape(target.shape), size, scales.reshape(shape), shifts.reshape(shape), I(bias), target)


# ------------------------------------------------------------------------------------------ small floats and tables


@cache
def _float_encoder(code, multiply, stochastic):
    kind = MINIFLOATS[code]
    largest, lowest, mantissa = F(kind.largest), I(127 + kind.lowest), I(kind.mantissa)
    sign_at = I(kind.bits - 1)

    def encode(lines, size, by, key0, key1, out):
        rows, length = lines.shape
        for line in range(rows):
            for group in range(by.shape[1]):
                first, last = group * size, min((group + 1) * size, length)
                part, into = lines[line, first:last], out[line, first:last]
                here = by[line, group]
                number = np.uint64(line * length + first)
                for i in range(part.size):
                    t = F(part[i] * here) if multiply else F(part[i] / here)
                    value = min(abs(t), largest)
                    exponent = I(max(I(F(value).view(np.int32) >> I(23)), lowest))
                    unit = I(I(exponent - mantissa) << I(23)).view(np.float32)
                    n = F(value / unit)
                    if stochastic:
                        n = np.floor(F(n + _uniform(np.uint64(number + np.uint64(i)), key0, key1)))
                    else:
                        n = np.rint(n)
                    bits = I(I(I(exponent - lowest) << mantissa) + I(n))
                    sign = I(I(t.view(np.int32) >> ALL) & I(1))
                    into[i] = B(bits | I(sign << sign_at))

    return loop(encode)


@kernel
def encode_float(lines, size, by, multiply, code, key, out):
    cut = _shaped(lines, size)
    keys = (U(0), U(0)) if key is None else (U(key[0]), U(key[1]))
    by = by.reshape(cut.shape[0], by.size // max(cut.shape[0], 1))
    _float_encoder(code, bool(multiply), key is not None)(cut, size, by, *keys, out.reshape(cut.shape))


@cache
def _table_encoder(multiply):
    def encode(lines, size, by, limits, own, out):
        rows, length = lines.shape
        for line in range(rows):
            for group in range(by.shape[1]):
                first, last = group * size, min((group + 1) * size, length)
                part, into = lines[line, first:last], out[line, first:last]
                here = by[line, group]
                limit = limits[line, group] if own else limits[0, 0]
                for i in range(part.size):
                    t = F(part[i] * here) if multiply else F(part[i] / here)
                    above, half = 0, (limit.size + 1) // 2
                    while half:  # there are 2^bits - 1 limits
                        above += half if t > limit[above + half - 1] else 0
                        half //= 2
                    into[i] = B(above)

    return loop(encode)


@kernel
def encode_table(lines, size, by, multiply, thresholds, out):
    cut = _shaped(lines, size)
    shape = cut.shape[0], by.size // max(cut.shape[0], 1)
    own = thresholds.ndim > 1
    limits = np.ascontiguousarray(thresholds).reshape(*(shape if own else (1, 1)), thresholds.shape[-1])
    _table_encoder(bool(multiply))(cut, size, by.reshape(shape), limits, own, out.reshape(cut.shape))


@loop
def _decode_table(codes, size, scales, levels, own, out, add):
    rows, length = codes.shape
    for line in range(rows):
        for group in range(scales.shape[1]):
            first, last = group * size, min((group + 1) * size, length)
            part, into = codes[line, first:last], out[line, first:last]
            scale = scales[line, group]
            table = levels[line, group] if own else levels[0, 0]
            for i in range(part.size):
                r = F(table[part[i]] * scale)
                into[i] = F(into[i] + r) if add else r


@kernel
def decode_table(codes, size, scales, levels, out, add):
    target = _shaped(out, size)
    shape = target.shape[0], scales.size // max(target.shape[0], 1)
    own = levels.ndim > 1
    tables = np.ascontiguousarray(levels).reshape(*(shape if own else (1, 1)), levels.shape[-1])
    _decode_table(codes.reshape(target.shape), size, scales.reshape(shape), tables, own, target, bool(add))


# ------------------------------------------------------------------------------------------ packing


@cache
def _packer(bits):
    powers = POWERS[bits]

    def pack_blocks(codes, out):
        for block in range(codes.size // BLOCK):
            part, into = codes[block * BLOCK : (block + 1) * BLOCK], out[block * 4 * bits : (block + 1) * 4 * bits]
            shift = place = 0
            for power in powers:
                apart = 4 * power
                for i in range(apart):
                    byte = 0
                    for k in range(8 // power):
                        byte |= ((part[k * apart + i] >> shift) & ((1 << power) - 1)) << (k * power)
                    into[place + i] = B(byte)
                place, shift = place + apart, shift + power

    return loop(pack_blocks)


@kernel
def pack(codes, bits, out):
    whole = len(codes) // BLOCK
    _packer(bits)(codes, out)
    reference.pack(codes[whole * BLOCK :], bits, out[whole * 4 * bits :])


@cache
def _unpacker(bits):
    powers = POWERS[bits]

    def unpack_blocks(packed, out):
        for block in range(out.size // BLOCK):
            part, into = packed[block * 4 * bits : (block + 1) * 4 * bits], out[block * BLOCK : (block + 1) * BLOCK]
            shift = place = 0
            for power in powers:
                apart = 4 * power
                for k in range(8 // power):
                    for i in range(apart):
                        field = B(((part[place + i] >> (k * power)) & ((1 << power) - 1)) << shift)
                        at = k * apart + i
                        into[at] = B(into[at] | field) if shift else field
                place, shift = place + apart, shift + power

    return loop(unpack_blocks)


@kernel
def unpack(packed, bits, out):
    whole = len(out) // BLOCK
    _unpacker(bits)(packed, out)
    reference.unpack(packed[whole * 4 * bits :], bits, out[whole * BLOCK :])
