/* Shared by the files of the module `_codecs`. Every bit is that of reference_codecs.py: no operation that rounds is
 * reordered or fused, and maxima of floats are taken over their bits as integers. */
#ifndef CHORUS_CODECS_H
#define CHORUS_CODECS_H

#include <string.h>

#include "formulas.h"
#include "kernel.h"

#define DO_PRAGMA(TEXT) _Pragma(#TEXT)

enum { NEAR = 2048 /* elements that stay in the L1 cache from one loop to the next, whole blocks */ };

/* Functions of the table in codecs.c: name, signature. CODE stands for the fields of `Code`. */
#define CODE "iiiiiirrriif?"
#define CODECS(CODEC)                            \
    CODEC(absmax, "fiF")                         \
    CODEC(peak, "fiF")                           \
    CODEC(minmax, "fiFF")                        \
    CODEC(encode, "fifif?" CODE "B")             \
    CODEC(quantize, "firiiirf?i" CODE "B~B~")    \
    CODEC(decode, "b~if~f?iiif?iF")              \
    CODEC(add_rows, "b~if~f?Flf?")               \
    CODEC(multiply_rows, "b~if~f?flF")           \
    CODEC(pack, "biB")                           \
    CODEC(unpack, "biB")                         \
    CODEC(optimal_edges, "diiDDWL")

#define DECLARE(NAME, SIGNATURE) double run_##NAME(const Argument *a);
CODECS(DECLARE)

/* Codes of `bits` bits in blocks, and those of the last, shorter block as a stream of bits. */
void pack_codes(const uint8_t *codes, int64_t count, int bits, uint8_t *out);
void unpack_codes(const uint8_t *packed, int64_t count, int bits, uint8_t *codes);

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Number of groups of `size` elements in a row, and the elements of group `group`. */
INLINE int64_t groups_of(int64_t columns, int64_t size) { return (columns + size - 1) / size; }
INLINE int64_t width_of(int64_t columns, int64_t size, int64_t group) { return least(size, columns - group * size); }

/* Run CALL(count) with a count that is known to the compiler for the most frequent sizes of groups. */
#define COUNTS(COUNT, CALL)                \
    do {                                   \
        switch (COUNT) {                   \
        case 16: CALL(16); break;          \
        case 32: CALL(32); break;          \
        case 64: CALL(64); break;          \
        case 128: CALL(128); break;        \
        default: CALL(COUNT);              \
        }                                  \
    } while (0)

#endif
