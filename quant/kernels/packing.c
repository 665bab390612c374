/* Dense packing of codes below 8 bits, in blocks of 32: a plane of 4, 2 or 1 bits for each power of two in the width. */
#include "codecs.h"

/* A plane of POWER bits: its bytes, and fields of them, all at once. */
#define PLANE(POWER)                                                                       \
    typedef uint8_t Plane##POWER __attribute__((vector_size(4 * POWER), aligned(1), may_alias)); \
    INLINE void pack_##POWER(const uint8_t *codes, int shift, uint8_t *out) {              \
        const Plane##POWER *fields = (const Plane##POWER *)codes;                          \
        Plane##POWER plane = {0};                                                          \
        for (int k = 0; k < 8 / POWER; k++)                                                \
            plane |= ((fields[k] >> shift) & ((1 << POWER) - 1)) << (k * POWER);           \
        *(Plane##POWER *)out = plane;                                                      \
    }                                                                                      \
    INLINE void unpack_##POWER(const uint8_t *packed, int shift, uint8_t *codes) {         \
        const Plane##POWER plane = *(const Plane##POWER *)packed;                          \
        Plane##POWER *fields = (Plane##POWER *)codes;                                      \
        for (int k = 0; k < 8 / POWER; k++) {                                              \
            const Plane##POWER field = ((plane >> (k * POWER)) & ((1 << POWER) - 1)) << shift; \
            fields[k] = field | (shift ? fields[k] : (Plane##POWER){0});                   \
        }                                                                                  \
    }

PLANE(4)
PLANE(2)
PLANE(1)

/* CALL for the planes of a width, each after `shift` bits: 7 bits are 4, 2 and 1. */
#define PLANES(CALL, FROM, TO, FROM_STEP, TO_STEP)                               \
    do {                                                                         \
        if (bits & 4)                                                            \
            CALL##_4(FROM, 0, TO);                                               \
        if (bits & 2)                                                            \
            CALL##_2(FROM + FROM_STEP * (bits & 4), bits & 4, TO + TO_STEP * (bits & 4)); \
        if (bits & 1)                                                            \
            CALL##_1(FROM + FROM_STEP * (bits & 6), bits & 6, TO + TO_STEP * (bits & 6)); \
    } while (0)

INLINE void pack_blocks(const uint8_t *codes, int64_t blocks, int bits, uint8_t *out) {
    for (; blocks > 0; blocks--, codes += BLOCK, out += 4 * bits)
        PLANES(pack, codes, out, 0, 4);
}

INLINE void unpack_blocks(const uint8_t *packed, int64_t blocks, int bits, uint8_t *codes) {
    for (; blocks > 0; blocks--, codes += BLOCK, packed += 4 * bits)
        PLANES(unpack, packed, codes, 4, 0);
}

/* Loops for each width: shifts and lengths are constants in them. */
#define EACH_WIDTH(CALL, FROM, TO) \
    switch (bits) {                \
    case 1: CALL(FROM, count / BLOCK, 1, TO); break; \
    case 2: CALL(FROM, count / BLOCK, 2, TO); break; \
    case 3: CALL(FROM, count / BLOCK, 3, TO); break; \
    case 4: CALL(FROM, count / BLOCK, 4, TO); break; \
    case 5: CALL(FROM, count / BLOCK, 5, TO); break; \
    case 6: CALL(FROM, count / BLOCK, 6, TO); break; \
    case 7: CALL(FROM, count / BLOCK, 7, TO); break; \
    case 8: memcpy(TO, FROM, (size_t)count); return; \
    }

CLONED void pack_codes(const uint8_t *codes, int64_t count, int bits, uint8_t *out) {
    EACH_WIDTH(pack_blocks, codes, out)
    const int64_t whole = count / BLOCK * BLOCK, rest = (count - whole) * bits;
    memset(out + whole / 8 * bits, 0, (size_t)(rest + 7) / 8);
    for (int64_t i = 0; i < rest; i++)
        out[whole / 8 * bits + i / 8] |= (uint8_t)(((codes[whole + i / bits] >> (i % bits)) & 1) << (i % 8));
}

CLONED void unpack_codes(const uint8_t *packed, int64_t count, int bits, uint8_t *codes) {
    EACH_WIDTH(unpack_blocks, packed, codes)
    const int64_t whole = count / BLOCK * BLOCK, rest = (count - whole) * bits;
    memset(codes + whole, 0, (size_t)(count - whole));
    for (int64_t i = 0; i < rest; i++)
        codes[whole + i / bits] |= (uint8_t)(((packed[whole / 8 * bits + i / 8] >> (i % 8)) & 1) << (i % bits));
}

/* codes, bits -> packed */
double run_pack(const Argument *a) {
    pack_codes(a[0].data, a[0].size, (int)a[1].integer, a[2].data);
    return 0;
}

/* packed, bits -> codes */
double run_unpack(const Argument *a) {
    unpack_codes(a[0].data, a[2].size, (int)a[1].integer, a[2].data);
    return 0;
}
