/* Dense packing of codes below 8 bits: see `formulas.h`. */
#include "codecs.h"

/* Run CALL(power, shift) for each plane of a width: 7 bits are 4, 2 and 1. */
#define EACH_PLANE(CALL)               \
    do {                               \
        if (bits & 4)                  \
            CALL(4, 0);                \
        if (bits & 2)                  \
            CALL(2, (bits & 4));       \
        if (bits & 1)                  \
            CALL(1, (bits & 6));       \
    } while (0)

/* Words of 4 codes in a block; a plane of a power of bits has as many packed words. */
enum { LANES = BLOCK / 4 };

/* The lowest bits of each byte of a word. */
INLINE uint32_t low_bits(int power) { return ((1u << power) - 1) * 0x01010101u; }

INLINE uint32_t word_at(const uint8_t *bytes, int place) {
    uint32_t word;
    memcpy(&word, bytes + 4 * place, sizeof word);
    return word;
}

INLINE void pack_blocks(const uint8_t *restrict codes, int64_t blocks, int bits, uint8_t *restrict out) {
    for (; blocks > 0; blocks--, codes += BLOCK, out += 4 * bits) {
#define PACK(POWER, SHIFT)                                                                               \
    for (int i = 0; i < POWER; i++) {                                                                    \
        uint32_t word = 0;                                                                               \
        for (int k = 0; k < 8 / POWER; k++)                                                              \
            word |= (word_at(codes, k * POWER + i) >> (SHIFT) & low_bits(POWER)) << (k * POWER);         \
        memcpy(out + 4 * ((SHIFT) + i), &word, sizeof word);                                             \
    }
        EACH_PLANE(PACK);
    }
}

INLINE void unpack_blocks(const uint8_t *restrict packed, int64_t blocks, int bits, uint8_t *restrict codes) {
    for (; blocks > 0; blocks--, codes += BLOCK, packed += 4 * bits)
        for (int w = 0; w < LANES; w++) {
            uint32_t word = 0;
#define UNPACK(POWER, SHIFT) \
    word |= (word_at(packed, (SHIFT) + w % POWER) >> (w / POWER * POWER) & low_bits(POWER)) << (SHIFT)
            EACH_PLANE(UNPACK);
            memcpy(codes + 4 * w, &word, sizeof word);
        }
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
    const int64_t whole = count / BLOCK * BLOCK;
    const int rest = (int)(count - whole);
    for (int i = 0; i < (rest * bits + 7) / 8; i++)
        out[whole / 8 * bits + i] = stream_byte(codes + whole, rest, bits, i);
}

CLONED void unpack_codes(const uint8_t *packed, int64_t count, int bits, uint8_t *codes) {
    EACH_WIDTH(unpack_blocks, packed, codes)
    const int64_t whole = count / BLOCK * BLOCK;
    for (int64_t i = whole; i < count; i++)
        codes[i] = stream_code(packed + whole / 8 * bits, bits, (int)(i - whole));
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
