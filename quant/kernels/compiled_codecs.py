"""Kernels compiled by numba: one pass over memory, bitwise equal to the reference.

Largest elements and codes are found in separate loops, which vectorise. No operation that rounds is reordered or fused;
maxima of floats are taken over their bits as integers. Functions are compiled at the first call and cached on disk.
"""

# mypy: ignore-errors
# numba infers other types than Python annotations could express.

import math
from functools import cache, wraps

import numpy as np

from quant import formats, packing
from quant.formats import GREATEST, LARGEST_LEVEL, MINIFLOATS
from quant.kernels import reference_codecs
from quant.kernels.jit import compiler, njit
from quant.packing import BLOCK, POWERS
from quant.spec import quant_spec
from quant.spec.quant_spec import ROUNDINGS

F, I, U, B = np.float32, np.int32, np.uint32, np.uint8
MAGNITUDE, ALL = I(0x7FFFFFFF), I(31)
ZERO, HALF, ONE = F(0), F(0.5), F(1)
NORMAL, INFINITE = I(0x00800000), I(0x7F800000)
NO_KEYS = U(0), U(0)
NIBBLES = BLOCK // 2
NEAR = 1 << 13
"""Number of elements that stay in the L1 cache between two passes."""

KERNELS = {}
"""Kernels of this module by the reference's names."""

loop = compiler(formats, packing, quant_spec, nogil=True, error_model="numpy")
"""Decorator that compiles a loop without reordering floating-point operations."""

inlined = njit(error_model="numpy", forceinline=True)


def kernel(function):
    """Register a function as the compiled version of the reference kernel of its name (decorator)."""
    KERNELS[function.__name__] = wraps(getattr(reference_codecs, function.__name__))(function)
    return KERNELS[function.__name__]


def _cut(rows, size, *per_group):
    """Reshape a matrix to one row if no group is short, and arrays with one entry per group to match."""
    cut = rows.reshape(1, -1) if rows.shape[1] % size == 0 else rows
    shape = cut.shape[0], -(-cut.shape[1] // size)
    return cut, *(values.reshape(*shape, *values.shape[2:]) for values in per_group)


# ------------------------------------------------------------------------------------------ ranges of groups


@inlined
def _ordered(bits):
    """Map float32 bits, as int32, to integers in the order of the floats; applied again, it maps back."""
    return I(bits ^ ((bits >> ALL) & MAGNITUDE))


@inlined
def _largest(bits):
    """Bits of the largest magnitude among float32 values that are given by their bits (int32)."""
    most = I(0)
    for i in range(bits.size):
        most = max(most, I(bits[i] & MAGNITUDE))  # numba's & gives int64, of which a vector has half as many
    return most


@inlined
def _farthest(bits):
    """Bits of the float32 value of largest magnitude, with its sign; the first of equal ones."""
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


@cache
def _range_finder(signed):
    def find(bits, size, out):
        count, length = bits.shape
        for row in range(count):
            for group in range(out.shape[1]):
                part = bits[row, group * size : min((group + 1) * size, length)]
                out[row, group] = _farthest(part) if signed else _largest(part)

    return loop(find)


def _per_group(rows, size, *shape):
    """Uninitialised float32 array for one value per group: shape (*shape, rows, groups per row)."""
    return np.empty((*shape, rows.shape[0], -(-rows.shape[1] // size)), np.float32)


def _find(rows, size, signed):
    found = _per_group(rows, size)
    cut, into = _cut(rows, size, found)
    _range_finder(signed)(cut.view(np.int32), size, into.view(np.int32))
    return found


@kernel
def absmax(rows, size):
    return _find(rows, size, signed=False)


@kernel
def peak(rows, size):
    return _find(rows, size, signed=True)


@loop
def _minmax(bits, size, low, high):
    count, length = bits.shape
    for row in range(count):
        for group in range(low.shape[1]):
            part = bits[row, group * size : min((group + 1) * size, length)]
            least = largest = _ordered(part[0])
            for i in range(part.size):
                here = _ordered(part[i])
                least = min(least, here)
                largest = max(largest, here)
            low[row, group], high[row, group] = _ordered(least), _ordered(largest)


@kernel
def minmax(rows, size):
    low, high = _per_group(rows, size, 2)
    cut, *bounds = _cut(rows, size, low, high)
    _minmax(cut.view(np.int32), size, *(bound.view(np.int32) for bound in bounds))
    return low, high


# ------------------------------------------------------------------------------------------ linear codes

NEAREST_EVEN, HALF_AWAY, HALF_UP, STOCHASTIC = range(len(ROUNDINGS))

PLAIN, AFTER, BEFORE = range(3)
"""Zero point: none, added after rounding, or added before."""


@inlined
def _mixed(word):
    word = U(word ^ (word >> U(16))) * U(0x85EBCA6B)
    word = U(word ^ U(U(word) >> U(13))) * U(0xC2B2AE35)
    return U(U(word) ^ U(U(word) >> U(16)))


@inlined
def _uniform(number, key0, key1):
    """Random number in [0, 1) of one element, as `reference_codecs.uniform` gives it."""
    low, high = U(number & np.uint64(0xFFFFFFFF)), U(number >> np.uint64(32))
    word = _mixed(U(_mixed(U(low ^ key0)) + U(high * U(0x9E3779B9)) + key1))
    return F(I(word >> U(8))) * F(2**-24)


@inlined
def _scaled(r, by, multiply):
    return F(r * by) if multiply else F(r / by)


@inlined
def _code(t, zero, limits, number, keys, rounding, shift):
    """Linear code, as a byte, of an element t in units of its scale; `rounding` and `shift`: compile-time constants."""
    low, high, bias = limits
    if shift == BEFORE:
        t = F(t + zero)
    if rounding == HALF_AWAY:
        size = abs(t)
        down = np.floor(size)
        t = math.copysign(F(down + (ONE if F(size - down) >= HALF else ZERO)), t)
    elif rounding == HALF_UP:
        t = F(np.floor(F(t + F(bias + HALF))) - bias)
    elif rounding == STOCHASTIC:
        t = np.floor(F(t + _uniform(number, keys[0], keys[1])))
    else:
        t = np.rint(t)
    if shift == AFTER:
        t = F(t + zero)
    t = low if t < low else t
    t = high if t > high else t
    return B(I(F(t + bias)))


def _keys(key):
    return NO_KEYS if key is None else (U(key[0]), U(key[1]))


def _limits(code):
    return F(code.low), F(code.high), F(code.bias)


@inlined
def _encode_group(rows, out, span, by, zero, limits, keys, kind):
    """Write the linear codes of a group to `out`, a byte each or packed in nibbles; `kind`: compile-time constants."""
    row, first, last = span
    nibbles, rounding, multiply, shift = kind
    if nibbles:
        for at in range(first, last, BLOCK):
            part, packed = rows[row, at : at + BLOCK], out[row, at // 2 : at // 2 + NIBBLES]
            number = np.uint64(row * rows.shape[1] + at)
            for i in range(NIBBLES):
                this, other = np.uint64(number + np.uint64(i)), np.uint64(number + np.uint64(i + NIBBLES))
                a = _code(_scaled(part[i], by, multiply), zero, limits, this, keys, rounding, shift)
                b = _code(_scaled(part[i + NIBBLES], by, multiply), zero, limits, other, keys, rounding, shift)
                packed[i] = B(a | B(b << B(4)))
    else:
        part, into = rows[row, first:last], out[row, first:last]
        number = np.uint64(row * rows.shape[1] + first)
        for i in range(part.size):
            this = np.uint64(number + np.uint64(i))
            into[i] = _code(_scaled(part[i], by, multiply), zero, limits, this, keys, rounding, shift)


def _packs_nibbles(bits, size, rows):
    """True if 4-bit codes can be packed as they are encoded: all groups are whole blocks of 32."""
    return bits == 4 and size % BLOCK == 0 and rows.shape[1] % size == 0


@cache
def _linear_encoder(nibbles, rounding, multiply, shift):
    def encode(rows, size, by, zeros, limits, keys, out):
        count, length = rows.shape
        for row in range(count):
            for group in range(by.shape[1]):
                span = row, group * size, min((group + 1) * size, length)
                zero = zeros[row, group] if shift != PLAIN else ZERO
                kind = nibbles, rounding, multiply, shift
                _encode_group(rows, out, span, by[row, group], zero, limits, keys, kind)

    return loop(encode)


@kernel
def encode_linear(rows, size, by, multiply, zeros, code, out):
    shift = PLAIN
    if zeros is not None:
        shift = AFTER if (zeros == np.rint(zeros)).all() else BEFORE
    nibbles = _packs_nibbles(code.bits, size, rows)
    codes = out if nibbles or code.bits == 8 else np.empty(rows.size, np.uint8)
    cut, by, zeros = _cut(rows, size, by, by if zeros is None else zeros)
    encode = _linear_encoder(nibbles, ROUNDINGS.index(code.rounding), bool(multiply), shift)
    encode(cut, size, by, zeros, _limits(code), _keys(code.key), codes.reshape(len(cut), -1))
    if codes is not out:
        pack(codes, code.bits, out)


@inlined
def _quotient(r, n):
    """r / n of non-negative numbers; denormal results are rounded up."""
    quotient = F(r / n)
    bits = I(F(quotient).view(np.int32))
    return I(bits + I(1)).view(np.float32) if bits < NORMAL and F(quotient * n) < r else quotient


@inlined
def _half(scale, up):
    """(bits, value) of a non-negative scale rounded to fp16; with `up`, denormal ones are rounded up."""
    exponent = I(max(I(F(scale).view(np.int32) >> I(23)), I(113)))
    unit = I(I(exponent - I(10)) << I(23)).view(np.float32)
    n = F(scale / unit)
    n = F(np.ceil(n)) if up and n < F(1024) else F(np.rint(n))
    return I(I(I(exponent - I(113)) << I(10)) + I(n)), F(n * unit)


@inlined
def _bfloat(scale, up):
    """(bits, value) of a non-negative scale rounded to bf16; with `up`, denormal ones are rounded up."""
    bits = I(F(scale).view(np.int32))
    half = I(0xFFFF) if up and bits < NORMAL else I(I(0x7FFF) + I(I(bits >> I(16)) & I(1)))
    raw = I(I(bits + half) >> I(16))
    return raw, I(raw << I(16)).view(np.float32)


@cache
def _fused_quantizer(form, nibbles, rounding, inverse, peak):
    """One-pass quantiser, without stochastic rounding, compiled at first call; returns False if a scale overflows."""
    half, brain = form == "fp16", form == "bf16"
    infinite_bits = 0x7C00 if half else (0x7F80 if brain else 0x7F800000)
    sign = 31 if form == "fp32" else 15

    def quantize(rows, size, steps, limits, scales, out):
        worst, infinite = I(0), I(infinite_bits)
        size_of_steps = abs(steps)
        count, length = rows.shape
        batch = max(NEAR // size, 1)
        largest, by = np.empty(batch, np.int32), np.empty(batch, np.float32)
        for row in range(count):
            for start in range(0, scales.shape[1], batch):
                groups = min(batch, scales.shape[1] - start)
                for group in range(groups):
                    first, last = (start + group) * size, min((start + group + 1) * size, length)
                    bits = rows[row, first:last].view(np.int32)
                    largest[group] = _farthest(bits) if peak else _largest(bits)
                for group in range(groups):
                    most = I(largest[group] & MAGNITUDE)
                    scale = _quotient(most.view(np.float32), size_of_steps)
                    raw, stored = I(F(scale).view(np.int32)), scale
                    if half:
                        raw, stored = _half(scale, not inverse)
                    if brain:
                        raw, stored = _bfloat(scale, not inverse)
                    worst = max(worst, raw if most < INFINITE else infinite)
                    down = peak and (largest[group] < 0) != (steps < 0)
                    scales[row, start + group] = I(raw | I(I(1) << I(sign))) if down else raw
                    stored = F(-stored) if down else stored
                    scale = F(-scale) if down else scale
                    if inverse:
                        by[group] = ZERO if scale == ZERO else F(max(min(F(ONE / scale), GREATEST), -GREATEST))
                    else:
                        by[group] = ONE if stored == ZERO else stored
                for group in range(groups):
                    span = row, (start + group) * size, min((start + group + 1) * size, length)
                    kind = nibbles, rounding, inverse, PLAIN
                    _encode_group(rows, out, span, by[group], ZERO, limits, NO_KEYS, kind)
        return worst < infinite

    return loop(quantize)


@kernel
def quantize_linear(rows, size, rule, code, scales, out):
    nibbles = _packs_nibbles(code.bits, size, rows)
    codes = out if nibbles or code.bits == 8 else np.empty(rows.size, np.uint8)
    cut, items = rows, scales.view(np.int32 if rule.form == "fp32" else np.uint16)
    if out.ndim == 1:
        cut, items = _cut(rows, size, items)
        codes = codes.reshape(len(cut), -1)
    quantizer = _fused_quantizer(rule.form, nibbles, ROUNDINGS.index(code.rounding), rule.inverse, rule.peak)
    if not quantizer(cut, size, F(rule.steps), _limits(code), items, codes):
        return False
    if code.bits < 8 and not nibbles:
        pack(codes.reshape(-1), code.bits, out)
    return True


@cache
def _overflow_check(shifted):
    """Test, compiled at first call: True if |scale| (`reach` + |zero point|) of any group rounds to infinity or NaN."""

    def may_overflow(scales, zeros, reach):
        most = I(0)
        for row in range(scales.shape[0]):
            for group in range(scales.shape[1]):
                distance = F(reach + abs(zeros[row, group])) if shifted else reach
                most = max(most, I(F(abs(scales[row, group]) * distance).view(np.int32) & MAGNITUDE))
        return most >= INFINITE

    return loop(may_overflow)


@inlined
def _product(q, scale, clamp):
    """q times scale in float32; with `clamp`, the largest finite number instead of infinity."""
    r = F(q * scale)
    if clamp:
        r = GREATEST if r > GREATEST else (-GREATEST if r < -GREATEST else r)
    return F(r)


@cache
def _bytes_decoder(signed, shifted, add, clamp):
    def decode(codes, size, scales, zeros, bias, out):
        count, length = codes.shape
        for row in range(count):
            for group in range(scales.shape[1]):
                first, last = group * size, min((group + 1) * size, length)
                part, into = codes[row, first:last], out[row, first:last]
                scale, zero = scales[row, group], zeros[row, group] if shifted else ZERO
                for i in range(part.size):
                    q = F(np.int8(part[i])) if signed else F(I(I(part[i]) - bias))
                    r = _product(F(q - zero) if shifted else q, scale, clamp)
                    into[i] = F(into[i] + r) if add else r

    return loop(decode)


@cache
def _nibbles_decoder(shifted, add, clamp):
    def decode(packed, size, scales, zeros, bias, out):
        for group in range(scales.size):
            scale, zero = scales[group], zeros[group] if shifted else ZERO
            for first in range(group * size, (group + 1) * size, BLOCK):
                part = packed[first // 2 : first // 2 + NIBBLES]
                lower, upper = out[first : first + NIBBLES], out[first + NIBBLES : first + BLOCK]
                for i in range(NIBBLES if add else part.size):  # so LLVM makes vectors of both
                    both = I(part[i])
                    a, b = F(I(I(both & I(15)) - bias)), F(I(I(both >> I(4)) - bias))
                    a = _product(F(a - zero) if shifted else a, scale, clamp)
                    b = _product(F(b - zero) if shifted else b, scale, clamp)
                    lower[i] = F(lower[i] + a) if add else a
                    upper[i] = F(upper[i] + b) if add else b

    return loop(decode)


@kernel
def decode_linear(packed, size, scales, zeros, code, out, add):
    shifted, nibbles, codes = zeros is not None, _packs_nibbles(code.bits, size, out), packed
    target, zeros = out, zeros if shifted else scales
    if packed.ndim == 1:
        target, scales, zeros = _cut(out, size, scales, zeros)
    clamp = _overflow_check(shifted)(scales, zeros, F(256))
    if nibbles:
        decode = _nibbles_decoder(shifted, bool(add), clamp)
        decode(packed, size, scales.reshape(-1), zeros.reshape(-1), I(code.bias), target.reshape(-1))
        return
    if code.bits < 8:
        codes = np.empty(out.size, np.uint8)
        unpack(packed, code.bits, codes)
    decode = _bytes_decoder(bool(code.signed and not code.bias), shifted, bool(add), clamp)
    decode(codes.reshape(target.shape), size, scales, zeros, I(code.bias), target)


# ------------------------------------------------------------------------------------------ small floats and tables


@cache
def _float_encoder(code, multiply, stochastic):
    kind = MINIFLOATS[code]
    greatest, smallest, digits, above = kind.largest, 127 + kind.lowest, kind.mantissa, kind.bits - 1

    def encode(rows, size, by, key0, key1, out):
        largest, lowest, mantissa, sign_at = F(greatest), I(smallest), I(digits), I(above)
        count, length = rows.shape
        for row in range(count):
            for group in range(by.shape[1]):
                first, last = group * size, min((group + 1) * size, length)
                part, into = rows[row, first:last], out[row, first:last]
                here = by[row, group]
                number = np.uint64(row * length + first)
                for i in range(part.size):
                    t = F(_scaled(part[i], here, multiply))
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
def encode_float(rows, size, by, multiply, code, key, out):
    cut, by = _cut(rows, size, by)
    _float_encoder(code, bool(multiply), key is not None)(cut, size, by, *_keys(key), out.reshape(cut.shape))


@inlined
def _above(t, limit):
    """Number of the 2^bits - 1 ascending limits that lie below t, by bisection."""
    above, half = 0, (limit.size + 1) // 2
    while half:
        above += half if t > limit[above + half - 1] else 0
        half //= 2
    return above


@cache
def _table_encoder(multiply, sixteen):
    """Encoder of elements by a table, compiled at its first call: 15 comparisons for 16 levels, else bisection."""

    def encode(rows, size, by, limits, out):
        count, length = rows.shape
        own = limits.size > limits.shape[2]
        for row in range(count):
            for group in range(by.shape[1]):
                first, last = group * size, min((group + 1) * size, length)
                part, into = rows[row, first:last], out[row, first:last]
                here = by[row, group]
                limit = limits[row, group] if own else limits[0, 0]
                if sixteen:
                    l0, l1, l2, l3, l4, l5, l6 = limit[0], limit[1], limit[2], limit[3], limit[4], limit[5], limit[6]
                    l7, l8, l9, l10, l11 = limit[7], limit[8], limit[9], limit[10], limit[11]
                    l12, l13, l14 = limit[12], limit[13], limit[14]
                    for i in range(part.size):
                        t = _scaled(part[i], here, multiply)
                        low = I(t > l0) + I(t > l1) + I(t > l2) + I(t > l3) + I(t > l4) + I(t > l5) + I(t > l6)
                        high = I(t > l8) + I(t > l9) + I(t > l10) + I(t > l11) + I(t > l12) + I(t > l13) + I(t > l14)
                        into[i] = B(low + high + I(t > l7))
                else:
                    for i in range(part.size):
                        into[i] = B(_above(_scaled(part[i], here, multiply), limit))

    return loop(encode)


@kernel
def encode_table(rows, size, by, multiply, thresholds, out):
    cut, by, limits = _cut_tables(rows, size, by, thresholds)
    encode = _table_encoder(bool(multiply), limits.shape[-1] == 15)
    encode(cut, size, by, limits, out.reshape(cut.shape))


def _cut_tables(rows, size, per_group, tables):
    """Reshape a matrix and per-group values as `_cut` does, and level tables to (1, 1, k) or (rows, groups, k)."""
    if tables.ndim == 1:
        return *_cut(rows, size, per_group), np.ascontiguousarray(tables).reshape(1, 1, -1)
    return _cut(rows, size, per_group, np.ascontiguousarray(tables))


@cache
def _table_decoder(clamp):
    def decode(codes, size, scales, levels, out, add):
        count, length = codes.shape
        own = levels.size > levels.shape[2]
        for row in range(count):
            for group in range(scales.shape[1]):
                first, last = group * size, min((group + 1) * size, length)
                part, into = codes[row, first:last], out[row, first:last]
                scale, table = scales[row, group], levels[row, group] if own else levels[0, 0]
                for i in range(part.size):
                    level = table[part[i]]
                    r = _product(level, scale, clamp and abs(level) <= GREATEST)
                    into[i] = F(into[i] + r) if add else r

    return loop(decode)


@kernel
def decode_table(codes, size, scales, levels, out, add):
    target, scales, tables = _cut_tables(out, size, scales, levels)
    decode = _table_decoder(_overflow_check(False)(scales, scales, LARGEST_LEVEL))
    decode(codes.reshape(target.shape), size, scales, tables, target, bool(add))


# ------------------------------------------------------------------------------------------ packing


@cache
def _packer(bits):
    powers = POWERS[bits]

    def pack_blocks(codes, out):
        for block in range(codes.size // BLOCK):
            part, into = codes[block * BLOCK : (block + 1) * BLOCK], out[block * 4 * bits : (block + 1) * 4 * bits]
            shift = 0
            for power in powers:
                apart = 4 * power
                for i in range(apart):
                    byte = 0
                    for k in range(8 // power):
                        byte |= ((part[k * apart + i] >> shift) & ((1 << power) - 1)) << (k * power)
                    into[4 * shift + i] = B(byte)
                shift += power

    return loop(pack_blocks)


@kernel
def pack(codes, bits, out):
    whole = len(codes) // BLOCK
    _packer(bits)(codes, out)
    reference_codecs.pack(codes[whole * BLOCK :], bits, out[whole * 4 * bits :])


@cache
def _unpacker(bits):
    powers = POWERS[bits]

    def unpack_blocks(packed, out):
        for block in range(out.size // BLOCK):
            part, into = packed[block * 4 * bits : (block + 1) * 4 * bits], out[block * BLOCK : (block + 1) * BLOCK]
            shift = 0
            for power in powers:
                apart = 4 * power
                for k in range(8 // power):
                    for i in range(apart):
                        field = B(((part[4 * shift + i] >> (k * power)) & ((1 << power) - 1)) << shift)
                        at = k * apart + i
                        into[at] = B(into[at] | field) if shift else field
                shift += power

    return loop(unpack_blocks)


@kernel
def unpack(packed, bits, out):
    whole = len(out) // BLOCK
    _unpacker(bits)(packed, out)
    reference_codecs.unpack(packed[whole * 4 * bits :], bits, out[whole * BLOCK :])
