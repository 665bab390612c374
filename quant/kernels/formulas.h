/* Formulas of every few-bit format: codes, numbers and packing, for one element or byte at a time. Those of scales are in
 * encode.c, as GPUs make scales by NumPy's functions.
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
    const int32_t more = up && size < float_of(first) && nearest < size;
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
