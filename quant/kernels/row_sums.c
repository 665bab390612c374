/* Rows of bytes that are decoded and added or multiplied at once. */
#include "codecs.h"

/* Decoded number of a byte: int8 without levels, else a number of a level. */
INLINE float element(uint8_t code, float scale, const float *levels) {
    if (!levels)
        return clamped((float)(int8_t)code * scale);
    const float level = levels[code], r = level * scale;
    return fabsf(level) <= GREATEST ? clamped(r) : r;
}

INLINE void add_span(const uint8_t *restrict codes, int64_t count, float scale, const float *levels, float weight,
                     bool weighted, float *restrict into) {
    if (weighted)
        for (int64_t j = 0; j < count; j++)
            into[j] += weight * element(codes[j], scale, levels);
    else
        for (int64_t j = 0; j < count; j++)
            into[j] += element(codes[j], scale, levels);
}

/* codes, size, scales, levels, y, places, weights: y[places[i]] += weights[i] row i */
CLONED double run_add_rows(const Argument *a) {
    const int64_t columns = a[0].columns, size = a[1].integer, *places = a[5].data;
    const float *levels = a[3].data, *weights = a[6].data;
    for (int64_t i = 0; i < a[5].size; i++)
        for (int64_t group = 0; group < groups_of(columns, size); group++) {
            const uint8_t *codes = (const uint8_t *)a[0].data + i * a[0].stride + group * size;
            const float scale = load_float((const char *)a[2].data + i * a[2].stride + 4 * group);
            float *into = (float *)a[4].data + places[i] * columns + group * size;
            const int64_t width = width_of(columns, size, group);
            if (levels)
                add_span(codes, width, scale, levels, weights ? weights[i] : 1.0f, weights, into);
            else
                add_span(codes, width, scale, NULL, weights ? weights[i] : 1.0f, weights, into);
        }
    return 0;
}

/* codes, size, scales, levels, x, places -> products: sums of x[places[i]] row i, whose terms are added in any order */
CLONED double run_multiply_rows(const Argument *a) {
    const int64_t columns = a[0].columns, size = a[1].integer, *places = a[5].data;
    const float *levels = a[3].data;
    for (int64_t i = 0; i < a[5].size; i++) {
        float total = 0;
        for (int64_t group = 0; group < groups_of(columns, size); group++) {
            const uint8_t *codes = (const uint8_t *)a[0].data + i * a[0].stride + group * size;
            const float scale = load_float((const char *)a[2].data + i * a[2].stride + 4 * group);
            const float *other = (const float *)a[4].data + places[i] * columns + group * size;
            const int64_t width = width_of(columns, size, group);
            if (levels)
                for (int64_t j = 0; j < width; j++)
                    total += other[j] * element(codes[j], scale, levels);
            else {
                DO_PRAGMA(omp simd reduction(+ : total))
                for (int64_t j = 0; j < width; j++)
                    total += other[j] * element(codes[j], scale, NULL);
            }
        }
        ((float *)a[6].data)[i] = total;
    }
    return 0;
}
