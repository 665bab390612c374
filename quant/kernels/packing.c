/* Dense packing of codes below 8 bits, in blocks of 32: a plane of 4, 2 or 1 bits for each power of two in the width. */
#include "codecs.h"

INLINE void pack_plane(const uint8_t *restrict codes, int power, int shift, uint8_t *restrict out) {
    for (int i = 0; i < 4 * power; i++) {
        int byte = 0;
        for (int k = 0; k < 8 / power; k++)
            byte |= ((codes[k * 4 * power + i] >> shift) & ((1 << power) - 1)) << (k * power);
        out[i] = (uint8_t)byte;
    }
}

/* The reverse, for a plane of POWER bits: all its bytes at once. */
#define UNPACK_PLANE(POWER)                                                                                  \
    INLINE void unpack_plane_##POWER(const uint8_t *packed, int shift, uint8_t *codes) {                     \
        typedef uint8_t Plane __attribute__((vector_size(4 * POWER), aligned(1), may_alias));                \
        const Plane plane = *(const Plane *)packed;                                                          \
        for (int k = 0; k < 8 / POWER; k++) {                                                                \
            Plane *into = (Plane *)(codes + k * 4 * POWER);                                                  \
            const Plane field = ((plane >> (k * POWER)) & ((1 << POWER) - 1)) << shift;                      \
            *into = shift ? (Plane)(*into | field) : (Plane)field;                                                      \
        }                                                                                                    \
    }

UNPACK_PLANE(4)
UNPACK_PLANE(2)
UNPACK_PLANE(1)

/* Planes of a width: 7 bits are 4, 2 and 1. */
INLINE void pack_block(const uint8_t *codes, int bits, uint8_t *out) {
    int shift = 0;
    if (bits & 4)
        pack_plane(codes, 4, 0, out), shift = 4;
    if (bits & 2)
        pack_plane(codes, 2, shift, out + 4 * shift), shift += 2;
    if (bits & 1)
        pack_plane(codes, 1, shift, out + 4 * shift);
}

INLINE void unpack_block(const uint8_t *packed, int bits, uint8_t *codes) {
    int shift = 0;
    if (bits & 4)
        unpack_plane_4(packed, 0, codes), shift = 4;
    if (bits & 2)
        unpack_plane_2(packed + 4 * shift, shift, codes), shift += 2;
    if (bits & 1)
        unpack_plane_1(packed + 4 * shift, shift, codes);
}

/* Loops for each width: shifts and lengths are constants in them. */
#define EACH_WIDTH(CALL) \
    switch (a[1].integer) { case 1: CALL(1); case 2: CALL(2); case 3: CALL(3); case 4: CALL(4); case 5: CALL(5); \
                            case 6: CALL(6); case 7: CALL(7); }

#define PACK(BITS)                                                                        \
    for (int64_t block = 0; block < a[0].size / BLOCK; block++)                           \
        pack_block((const uint8_t *)a[0].data + block * BLOCK, BITS, (uint8_t *)a[2].data + block * 4 * BITS); \
    return 0

#define UNPACK(BITS)                                                                      \
    for (int64_t block = 0; block < a[2].size / BLOCK; block++)                           \
        unpack_block((const uint8_t *)a[0].data + block * 4 * BITS, BITS, (uint8_t *)a[2].data + block * BLOCK); \
    return 0

/* codes, bits -> packed, of whole blocks */
CLONED double run_pack(const Argument *a) {
    EACH_WIDTH(PACK)
    return 0;
}

/* packed, bits -> codes, of whole blocks */
CLONED double run_unpack(const Argument *a) {
    EACH_WIDTH(UNPACK)
    return 0;
}
