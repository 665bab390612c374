/* Elementwise operators: activations with and without a bias, dropout. */
#include "operators.h"

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
BIASED(gelu)
BIASED(gelu_tanh)
BIASED(silu)

CLONED double run_biased_relu(const Argument *a) {
    const float *bias = a[1].data;
    const int64_t columns = a[1].size;
    for (int64_t first = 0; first < a[0].size; first += columns) {
        float *z = (float *)a[0].data + first;
        INDEPENDENT for (int64_t j = 0; j < columns; j++) z[j] = relu(z[j] + bias[j]);
    }
    return 0;
}

CLONED double run_masked(const Argument *a) {
    const float *x = a[0].data, scale = (float)a[2].number;
    const uint8_t *keep = a[1].data;
    float *y = a[3].data;
    INDEPENDENT for (int64_t i = 0; i < a[0].size; i++) y[i] = dropout(x[i], keep[i], scale);
    return 0;
}

enum { BLOCKS = 64 };

/* Flags of dropout: numbers of Philox-4x32-10 (Salmon et al., SC 2011) that are at least `limit`. The counter of four
 * neighbouring elements is (start + their number, 0, sample). */
CLONED double run_keep(const Argument *a) {
    const uint64_t *samples = a[0].data, limit = (uint64_t)a[1].integer, start = (uint64_t)a[4].integer;
    const int64_t blocks = a[5].columns / 4;
    for (int64_t row = 0; row < a[0].size; row++) {
        uint8_t *flags = (uint8_t *)a[5].data + row * 4 * blocks;
        for (int64_t first = 0; first < blocks; first += BLOCKS) {
            uint8_t kept[4 * BLOCKS];
            for (int i = 0; i < BLOCKS; i++) {
                uint64_t c0 = (uint32_t)(start + (uint64_t)(first + i)), c1 = 0; /* words, in 64 bits for products */
                uint64_t c2 = (uint32_t)samples[row], c3 = samples[row] >> 32;
                uint32_t k0 = (uint32_t)a[2].integer, k1 = (uint32_t)a[3].integer;
                for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
                    const uint64_t left = c0 * 0xD2511F53u, right = c2 * 0xCD9E8D57u;
                    c0 = (right >> 32) ^ c1 ^ k0;
                    c1 = (uint32_t)right;
                    c2 = (left >> 32) ^ c3 ^ k1;
                    c3 = (uint32_t)left;
                }
                kept[4 * i] = c0 >= limit;
                kept[4 * i + 1] = c1 >= limit;
                kept[4 * i + 2] = c2 >= limit;
                kept[4 * i + 3] = c3 >= limit;
            }
            memcpy(flags + 4 * first, kept, (size_t)(4 * (blocks - first < BLOCKS ? blocks - first : BLOCKS)));
        }
    }
    return 0;
}
