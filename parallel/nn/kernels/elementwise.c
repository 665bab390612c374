/* Elementwise operators: activations with and without a bias, dropout. */
#include "operators.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define UNARY(NAME)                                                                  \
    CLONED double run_##NAME(const Argument *a) {                                    \
        const float *x = a[0].data;                                                  \
        float *y = a[1].data;                                                        \
        INDEPENDENT for (int64_t i = 0; i < a[0].size; i++) y[i] = NAME(x[i]);       \
        return 0;                                                                    \
    }

#define BINARY(NAME)                                                                 \
    CLONED double run_##NAME(const Argument *a) {                                    \
        const float *dy = a[0].data, *x = a[1].data;                                 \
        float *dx = a[2].data;                                                       \
        INDEPENDENT for (int64_t i = 0; i < a[0].size; i++) dx[i] = NAME(dy[i], x[i]); \
        return 0;                                                                    \
    }

/* z += bias for rows of z, and y = f(z), which may be z itself. */
#define BIASED(NAME)                                                                 \
    CLONED double run_biased_##NAME(const Argument *a) {                             \
        const float *bias = a[1].data;                                               \
        const int64_t columns = a[1].size;                                           \
        for (int64_t first = 0; first < a[0].size; first += columns) {               \
            float *z = (float *)a[0].data + first, *y = (float *)a[2].data + first;  \
            INDEPENDENT for (int64_t j = 0; j < columns; j++) {                      \
                const float x = z[j] + bias[j];                                      \
                z[j] = x;                                                            \
                y[j] = NAME(x);                                                      \
            }                                                                        \
        }                                                                            \
        return 0;                                                                    \
    }

UNARY(gelu)
UNARY(gelu_tanh)
UNARY(silu)
BINARY(relu_backward)
BINARY(gelu_backward)
BINARY(gelu_tanh_backward)
BINARY(silu_backward)
BIASED(relu)
BIASED(gelu)
BIASED(gelu_tanh)
BIASED(silu)

CLONED double run_masked(const Argument *a) {
    const float *x = a[0].data, scale = (float)a[2].number;
    const uint8_t *keep = a[1].data;
    float *y = a[3].data;
    INDEPENDENT for (int64_t i = 0; i < a[0].size; i++) y[i] = dropout(x[i], keep[i], scale);
    return 0;
}

/* Words of two counters' blocks, in the low halves; the high halves are arbitrary. */
typedef uint64_t Words __attribute__((vector_size(16)));

#ifdef __SSE2__
INLINE Words products(Words x, Words y) { return (Words)_mm_mul_epu32((__m128i)x, (__m128i)y); }
#else
INLINE Words products(Words x, Words y) { return (x & 0xFFFFFFFFu) * (y & 0xFFFFFFFFu); }
#endif

enum { PAIRS = 2 /* of blocks that are computed together: a product waits for the one before */, BLOCKS = 64 };

/* Flags of dropout: numbers of Philox-4x32-10 (Salmon et al., SC 2011) that are at least `limit`. The counter of four
 * neighbouring elements is (start + their number, 0, sample). */
CLONED double run_keep(const Argument *a) {
    const uint64_t *samples = a[0].data, start = (uint64_t)a[4].integer;
    const uint32_t limit = (uint32_t)a[1].integer;
    const uint8_t any = a[1].integer >> 32 == 0; /* of a limit of 2^32, none */
    const int64_t blocks = a[5].columns / 4;
    const Words first_factor = {0xD2511F53u, 0xD2511F53u}, second_factor = {0xCD9E8D57u, 0xCD9E8D57u};
    for (int64_t row = 0; row < a[0].size; row++) {
        uint8_t *flags = (uint8_t *)a[5].data + row * 4 * blocks;
        for (int64_t first = 0; first < blocks; first += BLOCKS) {
            uint32_t numbers[4 * BLOCKS];
            for (int i = 0; i < BLOCKS; i += 2 * PAIRS) {
                Words c0[PAIRS], c1[PAIRS], c2[PAIRS], c3[PAIRS];
                for (int p = 0; p < PAIRS; p++) {
                    const uint64_t counter = start + (uint64_t)(first + i + 2 * p);
                    c0[p] = (Words){counter, counter + 1}, c1[p] = (Words){0, 0};
                    c2[p] = (Words){samples[row], samples[row]}, c3[p] = c2[p] >> 32;
                }
                uint32_t k0 = (uint32_t)a[2].integer, k1 = (uint32_t)a[3].integer;
                for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
                    for (int p = 0; p < PAIRS; p++) {
                        const Words left = products(c0[p], first_factor), right = products(c2[p], second_factor);
                        c0[p] = (right >> 32) ^ c1[p] ^ k0;
                        c1[p] = right;
                        c2[p] = (left >> 32) ^ c3[p] ^ k1;
                        c3[p] = left;
                    }
                for (int block = 0; block < 2 * PAIRS; block++) {
                    const int p = block / 2, place = block % 2;
                    const uint32_t four[4] = {(uint32_t)c0[p][place], (uint32_t)c1[p][place], (uint32_t)c2[p][place],
                                              (uint32_t)c3[p][place]};
                    memcpy(numbers + 4 * (i + block), four, sizeof four);
                }
            }
            uint8_t kept[4 * BLOCKS];
            for (int i = 0; i < 4 * BLOCKS; i++)
                kept[i] = (numbers[i] >= limit) & any;
            memcpy(flags + 4 * first, kept, (size_t)least(4 * (blocks - first), 4 * BLOCKS));
        }
    }
    return 0;
}
