/* Formulas of codes for one element, without branches, so that loops over them vectorise. CUDA sources of device_codecs.py
 * contain this text. Every bit is that of reference_codecs.py. */
#ifndef CHORUS_FORMULAS_H
#define CHORUS_FORMULAS_H

#ifndef CUDA_SOURCE
#include "portable.h"
#include "random.h"
#endif

#define GREATEST 3.4028234663852886e38f

enum { MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000, PLACES = 23 /* bits of a float32's mantissa */ };
enum { NEAREST_EVEN, HALF_AWAY, HALF_UP, STOCHASTIC };

/* The largest finite number instead of infinity; NaN stays NaN. */
INLINE float clamped(float r) {
    r = r > GREATEST ? GREATEST : r;
    return r < -GREATEST ? -GREATEST : r;
}

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

/* (q - zero) scale; infinite levels of small floats stay infinite. */
INLINE float decoded(float level, float scale, float zero) {
    const float r = (level - zero) * scale;
    return fabsf(level) <= GREATEST ? clamped(r) : r;
}

#endif
