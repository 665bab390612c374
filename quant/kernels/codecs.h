/* Shared by the files of the module `_codecs`. Every bit is that of reference_codecs.py: no operation that rounds is
 * reordered or fused, and maxima of floats are taken over their bits as integers. */
#ifndef CHORUS_CODECS_H
#define CHORUS_CODECS_H

#include <string.h>

#include "kernel.h"
#include "random.h"

#define DO_PRAGMA(TEXT) _Pragma(#TEXT)

enum { MAGNITUDE = 0x7FFFFFFF, NORMAL = 0x00800000, INFINITE = 0x7F800000 };
enum { BLOCK = 32 /* codes that are packed together */, CHUNK = 512 /* elements of a temporary array */ };
enum { NEAREST_EVEN, HALF_AWAY, HALF_UP, STOCHASTIC };
enum { PLAIN, AFTER, BEFORE }; /* zero point: none, added after rounding, or added before */
enum { FP32, FP16, BF16 };

#define GREATEST 3.4028234663852886e38f

/* Functions of the table in codecs.c: name, signature. */
#define CODECS(CODEC)                           \
    CODEC(absmax, "fiF")                        \
    CODEC(peak, "fiF")                          \
    CODEC(minmax, "fiFF")                       \
    CODEC(encode_linear, "fiff?iiirrriiiB")     \
    CODEC(quantize_linear, "firiiiirrriB~B~")   \
    CODEC(decode_bytes, "b~if~f?iiiF")          \
    CODEC(decode_nibbles, "biff?iiF")           \
    CODEC(encode_float, "fifiiiiriiiB")         \
    CODEC(encode_table, "fififiB")              \
    CODEC(decode_table, "b~if~fiiF")            \
    CODEC(add_rows, "b~if~f?Flf?")              \
    CODEC(multiply_rows, "b~if~f?flF")          \
    CODEC(pack, "biB")                          \
    CODEC(unpack, "biB")                        \
    CODEC(optimal_edges, "diiDDWL")

#define DECLARE(NAME, SIGNATURE) double run_##NAME(const Argument *a);
CODECS(DECLARE)

/* 16 numbers, at any address. */
typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(1), may_alias));
typedef float Floats __attribute__((vector_size(64), aligned(1), may_alias));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Number of groups of `size` elements in a row, and the elements of group `group`. */
INLINE int64_t groups_of(int64_t columns, int64_t size) { return (columns + size - 1) / size; }
INLINE int64_t width_of(int64_t columns, int64_t size, int64_t group) { return least(size, columns - group * size); }

INLINE float load_float(const char *from) {
    float x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Run CALL(count) with a count that is known to the compiler for groups of 16 and 32, the most frequent ones. */
#define SHORT_COUNTS(COUNT, CALL) \
    do {                          \
        if ((COUNT) == 32)        \
            CALL(32);             \
        else if ((COUNT) == 16)   \
            CALL(16);             \
        else                      \
            CALL(COUNT);          \
    } while (0)

/* The largest finite number instead of infinity; NaN stays NaN. */
INLINE float clamped(float r) {
    r = r > GREATEST ? GREATEST : r;
    return r < -GREATEST ? -GREATEST : r;
}

/* Element in units of its scale. */
INLINE void scaled(const float *restrict r, int64_t count, float by, bool multiply, float *restrict t) {
    if (multiply)
        for (int64_t i = 0; i < count; i++)
            t[i] = r[i] * by;
    else
        for (int64_t i = 0; i < count; i++)
            t[i] = r[i] / by;
}

#endif
