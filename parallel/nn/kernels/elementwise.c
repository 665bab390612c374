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

enum { BLOCKS = 64 /* of four numbers each, which are computed side by side */ };

/* Flags of dropout: numbers of `philox` that are at least `limit`. The counter of four neighbouring elements is (start + their
 * number, 0, sample). */
CLONED double run_keep(const Argument *a) {
    const uint64_t *samples = a[0].data;
    const uint32_t limit = (uint32_t)a[1].integer, key0 = (uint32_t)a[2].integer, key1 = (uint32_t)a[3].integer;
    const uint8_t any = a[1].integer >> 32 == 0; /* of a limit of 2^32, none */
    const int64_t blocks = a[5].columns / 4;
    for (int64_t row = 0; row < a[0].size; row++)
        for (int64_t first = 0; first < blocks; first += BLOCKS) {
            const uint32_t begin = (uint32_t)(a[4].integer + first), low = (uint32_t)samples[row];
            const uint32_t high = (uint32_t)(samples[row] >> 32);
            uint8_t kept[4 * BLOCKS];
            for (uint32_t i = 0; i < BLOCKS; i++) {
                uint32_t words[4] = {begin + i, 0, low, high};
                philox(words, key0, key1);
                kept[4 * i] = (words[0] >= limit) & any;
                kept[4 * i + 1] = (words[1] >= limit) & any;
                kept[4 * i + 2] = (words[2] >= limit) & any;
                kept[4 * i + 3] = (words[3] >= limit) & any;
            }
            const int64_t count = least(4 * (blocks - first), 4 * BLOCKS);
            memcpy((uint8_t *)a[5].data + 4 * (row * blocks + first), kept, (size_t)count);
        }
    return 0;
}
