/* Formulas of every few-bit format: codes, numbers, scales and packing, for one element, group or byte at a time.
 *
 * The loops in C and the CUDA kernels of device_codecs.py are made of them. None has a branch that depends on an element,
 * so that loops vectorise. Every bit is that of reference_codecs.py. */
#ifndef CHORUS_FORMULAS_H
#define CHORUS_FORMULAS_H

#include "portable.h"

#define GREATEST 3.4028234663852886e38f

enum { MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000, PLACES = 23 /* bits of a float32's mantissa */ };

/* ---------------------------------------------------------------------------------------- random numbers */

#define MIX_FIRST 0x85EBCA6Bu /* factors of MurmurHash3 (A. Appleby) */
#define MIX_SECOND 0xC2B2AE35u
#define MIX_HIGH 0x9E3779B9u            /* 2^32 divided by the golden ratio */
#define UNIT_24 5.9604644775390625e-8f /* 2^-24 */

INLINE uint32_t mixed(uint32_t word) {
    word = (word ^ (word >> 16)) * MIX_FIRST;
    word = (word ^ (word >> 13)) * MIX_SECOND;
    return word ^ (word >> 16);
}

/* Random number in [0, 1) of an element, a function of its number and the key. */
INLINE float uniform(uint64_t number, uint32_t key0, uint32_t key1) {
    const uint32_t low = (uint32_t)number, high = (uint32_t)(number >> 32);
    const uint32_t word = mixed(mixed(low ^ key0) + (high * MIX_HIGH + key1));
    return (float)(int32_t)(word >> 8) * UNIT_24;
}

/* ---------------------------------------------------------------------------------------- codes */

enum { NEAREST_EVEN, HALF_AWAY, HALF_UP, STOCHASTIC };

/* The largest finite number instead of infinity; NaN stays NaN. */
INLINE float clamped(float r) {
    r = r > GREATEST ? GREATEST : r;
    return r < -GREATEST ? -GREATEST : r;
}

INLINE float in_units(float r, float by, bool multiply) { return multiply ? r * by : r / by; }

/* Integer near t; `drawn` is the random number of stochastic rounding. */
INLINE float rounded(float t, int rounding, float bias, float drawn) {
    if (rounding == NEAREST_EVEN)
        return rintf(t);
    if (rounding == HALF_UP)
        return floorf(t + (bias + 0.5f)) - bias;
    if (rounding == STOCHASTIC)
        return floorf(t + drawn);
    const float size = fabsf(t), down = floorf(size);
    return copysignf(down + (size - down >= 0.5f ? 1.0f : 0.0f), t);
}

/* Code of an integer, from `low` to `high`. */
INLINE uint8_t integer_code(float n, float low, float high, float bias) {
    n = n < low ? low : n;
    n = n > high ? high : n;
    return (uint8_t)(int32_t)(n + bias);
}

/* Bits of a non-negative number rounded to a small float, with its value. With `up`, numbers below the normal ones are
 * rounded up.
 *
 * In units of the last place of its octave, a number is an integer n. Octaves follow each other so that the bits are
 * (octave 2^mantissa) + n, even if n carries into the next octave. Once 2^23 units are added, the number is rounded to the
 * nearest even n, which is in the last bits of the sum. */
INLINE int32_t small_float(float size, int mantissa, int lowest, bool up, float *value) {
    const int32_t first = lowest << PLACES, own = bits_of(size) & INFINITE, octave = own > first ? own : first;
    const int32_t unit = octave - (mantissa << PLACES), many = unit + (PLACES << PLACES);
    const float sum = size + float_of(many), nearest = sum - float_of(many);
    const int32_t more = up & (size < float_of(first)) & (nearest < size);
    *value = more ? nearest + float_of(unit) : nearest;
    return ((octave - first) >> (PLACES - mantissa)) + (bits_of(sum) - many) + more;
}

/* Code of a small float of this many bits. */
INLINE uint8_t float_code(float t, int bits, int mantissa, int lowest, float largest, int rounding, float drawn) {
    const float size = fabsf(t) < largest ? fabsf(t) : largest;
    const uint32_t sign = ((uint32_t)bits_of(t) >> 31) << (bits - 1);
    float value;
    if (rounding == NEAREST_EVEN)
        return (uint8_t)((uint32_t)small_float(size, mantissa, lowest, false, &value) | sign);
    const int32_t first = lowest << PLACES, own = bits_of(size) & INFINITE, octave = own > first ? own : first;
    const float inverse_unit = float_of((254 << PLACES) - (octave - (mantissa << PLACES)));
    const int32_t n = (int32_t)floorf(size * inverse_unit + drawn);
    return (uint8_t)((uint32_t)(((octave - first) >> (PLACES - mantissa)) + n) | sign);
}

/* Code of a table: the number of its ascending limits, one less than a power of two, that lie below t. */
INLINE uint8_t table_code(float t, const float *limits, int32_t levels) {
    int32_t below = 0;
    if (levels == 15) { /* faster than the search in steps that depend on each other */
        for (int32_t k = 0; k < 15; k++)
            below += t > limits[k];
        return (uint8_t)below;
    }
    for (int32_t half = (levels + 1) / 2; half; half /= 2)
        below += t > limits[below + half - 1] ? half : 0;
    return (uint8_t)below;
}

/* ---------------------------------------------------------------------------------------- numbers of codes */

/* Integer of a code before its scale: int8 has the `flip` 128 and the bias 128. */
INLINE float integer_level(uint8_t code, uint8_t flip, int32_t bias) { return (float)((int32_t)(code ^ flip) - bias); }

/* (q - zero) scale; infinite levels of small floats stay infinite. */
INLINE float decoded(float level, float scale, float zero) {
    const float r = (level - zero) * scale;
    return fabsf(level) <= GREATEST ? clamped(r) : r;
}

/* ---------------------------------------------------------------------------------------- scales */

/* Formats of scales; OCTAVES are those of microscaling formats: the power of two of the largest element. */
enum { FP32, FP16, BF16, E8M0, E4M3, WHOLE, OCTAVES };

typedef struct {
    int form;
    bool inverse; /* codes are r times the inverse of the unrounded scale, not r divided by the stored one */
    bool peak;    /* scales have the sign of the farthest element, relative to that of `steps` */
    float steps;  /* a scale is the largest magnitude / steps */
    float top;    /* WHOLE: largest scale; OCTAVES: exponent of the code's largest number */
} Rule;

/* r / n of non-negative numbers; denormal results are rounded up. */
INLINE float quotient_of(float r, float n) {
    const float quotient = r / n;
    const int32_t bits = bits_of(quotient);
    return float_of(bits + ((bits < 1 << PLACES) & (quotient * n < r)));
}

/* Bits of a non-negative scale rounded to a format, with its value; with `up`, denormal ones are rounded up. */
INLINE int32_t stored_scale(float scale, int form, bool up, float top, float *value) {
    const int32_t bits = bits_of(scale);
    *value = scale;
    if (form == FP16)
        return small_float(scale < 65536.0f ? scale : 65536.0f, 10, 113, up, value);
    if (form == E4M3)
        return small_float(scale < 448.0f ? scale : 448.0f, 3, 121, up, value);
    if (form == BF16) {
        const int32_t half = up & (bits < 1 << PLACES) ? 0xFFFF : 0x7FFF + ((bits >> 16) & 1);
        const int32_t raw = (int32_t)(((uint32_t)bits + (uint32_t)half) >> 16);
        *value = float_of((int32_t)((uint32_t)raw << 16));
        return raw;
    }
    if (form == E8M0 || form == OCTAVES) {
        int32_t exponent = form == E8M0 ? (int32_t)(((uint32_t)bits + 0x7FFFFF) >> PLACES) : (bits >> PLACES) - (int32_t)top;
        exponent = (form == E8M0 && bits <= 0x00400000) || exponent < 0 ? 0 : (exponent > 254 ? 254 : exponent);
        *value = float_of(exponent ? exponent << PLACES : 0x00400000);
        return exponent;
    }
    if (form == WHOLE) {
        const float whole = rintf(scale < top ? scale : top);
        *value = up & (whole == 0.0f) & (scale != 0.0f) ? 1.0f : whole;
        return (int32_t)*value;
    }
    return bits;
}

/* Bits of the first scale that a format cannot represent. */
INLINE int32_t scale_limit(int form) {
    return form == FP16 ? 0x477FF000 : (form == BF16 ? 0x7F7F8000 : (form == E4M3 ? 0x43E80001 : INFINITE));
}

/* True if scales of a format are powers of two, whose inverse elements are multiplied by. */
INLINE bool is_power(int form) { return form == E8M0 || form == OCTAVES; }

/* Stored scale of a group with the farthest element `most`, a float's bits. Elements are divided by `by`, or multiplied
 * with it if the rule is `inverse` or the format `is_power`; `seen` has the bits of the scale before rounding. With
 * `gamma` >= 0, scales are multiples of this parent. */
INLINE int32_t group_scale(int32_t most, Rule rule, float gamma, float *by, int32_t *seen) {
    const bool nested = gamma >= 0.0f, octaves = rule.form == OCTAVES;
    const float magnitude = float_of(most & MAGNITUDE);
    const float ideal = octaves ? magnitude : quotient_of(magnitude, fabsf(rule.steps));
    const float scale = nested ? ideal / (gamma == 0.0f ? 1.0f : gamma) : ideal;
    const int32_t sign = rule.peak ? (most ^ bits_of(rule.steps)) & ~MAGNITUDE : 0;
    float value;
    const int32_t item = stored_scale(scale, rule.form, !rule.inverse, rule.top, &value);
    value = nested ? clamped(gamma * value) : value;
    const float divisor = octaves ? value : ideal, inverse = divisor == 0.0f ? 0.0f : clamped(1.0f / divisor);
    value = is_power(rule.form) ? 1.0f / value : (value == 0.0f ? 1.0f : value);
    *by = float_of(bits_of(rule.inverse ? inverse : value) ^ sign);
    *seen = bits_of(scale);
    return item | (rule.form == FP32 ? sign : (int32_t)((uint32_t)sign >> 16));
}

/* ---------------------------------------------------------------------------------------- packing */

/* Codes of 1 to 7 bits are packed in blocks. A block has a plane of 4, 2 or 1 bits for each power of two in the width, the
 * widest first. A byte of a plane has the fields of several codes, `4 power` codes apart: those from bit `shift` on. */
enum { BLOCK = 32 /* codes */ };

INLINE uint8_t plane_byte(const uint8_t *codes, int power, int shift, int place) {
    uint8_t byte = 0;
    for (int k = 0; k < 8 / power; k++)
        byte |= (uint8_t)(((codes[k * 4 * power + place] >> shift) & ((1 << power) - 1)) << (k * power));
    return byte;
}

/* Field k of a byte of a plane. */
INLINE uint8_t plane_field(uint8_t byte, int power, int k) { return (uint8_t)((byte >> (k * power)) & ((1 << power) - 1)); }

/* The codes after the last block are a stream of bits, the least significant first: its byte, and one of `count` codes. */
INLINE uint8_t stream_byte(const uint8_t *codes, int count, int bits, int place) {
    uint8_t byte = 0;
    for (int i = 8 * place; i < 8 * place + 8 && i < count * bits; i++)
        byte |= (uint8_t)(((codes[i / bits] >> (i % bits)) & 1) << (i % 8));
    return byte;
}

INLINE uint8_t stream_code(const uint8_t *stream, int bits, int place) {
    uint8_t code = 0;
    for (int i = 0; i < bits; i++)
        code |= (uint8_t)(((stream[(place * bits + i) / 8] >> ((place * bits + i) % 8)) & 1) << i);
    return code;
}

/* Byte `place` of all packed codes: those of blocks, and the stream after them. */
INLINE uint8_t packed_byte(const uint8_t *codes, int64_t count, int bits, int64_t place) {
    const int64_t block = place / (4 * bits);
    const int inner = (int)(place % (4 * bits)), rest = (int)(count % BLOCK);
    codes += block * BLOCK;
    if (block == count / BLOCK)
        return stream_byte(codes, rest, bits, inner);
    for (int power = 4, shift = 0; power; shift += bits & power, power /= 2)
        if ((bits & power) && inner < 4 * (shift + power))
            return plane_byte(codes, power, shift, inner - 4 * shift);
    return 0;
}

/* Code `place` of all packed codes. */
INLINE uint8_t unpacked_code(const uint8_t *packed, int64_t count, int bits, int64_t place) {
    const int64_t block = place / BLOCK;
    const int inner = (int)(place % BLOCK);
    uint8_t code = 0;
    packed += block * 4 * bits;
    if (block == count / BLOCK)
        return stream_code(packed, bits, inner);
    for (int power = 4, shift = 0; power; shift += bits & power, power /= 2)
        if (bits & power)
            code |= (uint8_t)(plane_field(packed[4 * shift + inner % (4 * power)], power, inner / (4 * power)) << shift);
    return code;
}

#endif
