/* Codes of small floats and of tables. */
#include "codecs.h"

/* A small float: its lowest exponent, bits of the mantissa, place of the sign, largest value. */
typedef struct {
    int32_t lowest, mantissa, sign_at;
    float greatest;
} Minifloat;

INLINE float magnitude(float t, const Minifloat *kind) { return fabsf(t) < kind->greatest ? fabsf(t) : kind->greatest; }

INLINE int32_t exponent_of(float value, const Minifloat *kind) {
    const int32_t exponent = bits_of(value) >> 23;
    return exponent > kind->lowest ? exponent : kind->lowest;
}

/* In units of the last place of its exponent, a number is an integer n. Exponents follow each other so that the bits are
 * (exponent 2^mantissa) + n, even if n carries into the next exponent. The unit is a power of two: multiplying by its
 * inverse is exact. */
INLINE float in_units(float t, const Minifloat *kind) {
    const float value = magnitude(t, kind);
    return value * float_of((254 - (exponent_of(value, kind) - kind->mantissa)) << 23);
}

INLINE uint8_t minifloat(float t, float n, const Minifloat *kind) {
    const int32_t bits = ((exponent_of(magnitude(t, kind), kind) - kind->lowest) << kind->mantissa) + (int32_t)n;
    return (uint8_t)((uint32_t)bits | ((uint32_t)bits_of(t) >> 31) << kind->sign_at);
}

INLINE void encode_floats(const float *restrict r, int64_t count, float by, bool multiply, const Minifloat *kind,
                          uint8_t *restrict out) {
    if (multiply)
        for (int64_t i = 0; i < count; i++)
            out[i] = minifloat(r[i] * by, rintf(in_units(r[i] * by, kind)), kind);
    else
        for (int64_t i = 0; i < count; i++)
            out[i] = minifloat(r[i] / by, rintf(in_units(r[i] / by, kind)), kind);
}

/* rows, size, by, multiply, lowest, mantissa, sign bit, largest, stochastic, key, key -> codes */
CLONED double run_encode_float(const Argument *a) {
    const int64_t columns = a[0].columns, size = a[1].integer;
    const float *by = a[2].data;
    const Minifloat kind = {(int32_t)a[4].integer, (int32_t)a[5].integer, (int32_t)a[6].integer, (float)a[7].number};
    const uint32_t key0 = (uint32_t)a[9].integer, key1 = (uint32_t)a[10].integer;
    const bool multiply = a[3].integer;
    for (int64_t at = 0, row = 0; at < a[0].size; at = ++row * columns)
        for (int64_t first = at; first < at + columns; first += size, by++) {
            const int64_t count = least(size, at + columns - first);
            const float *r = (const float *)a[0].data + first, here = *by;
            uint8_t *out = (uint8_t *)a[11].data + first;
            if (a[8].integer)
                for (int64_t i = 0; i < count; i++) {
                    const float t = multiply ? r[i] * here : r[i] / here;
                    out[i] = minifloat(t, floorf(in_units(t, &kind) + uniform((uint64_t)(first + i), key0, key1)), &kind);
                }
            else {
#define FLOATS(COUNT) encode_floats(r, COUNT, here, multiply, &kind, out)
                SHORT_COUNTS(count, FLOATS);
            }
        }
    return 0;
}

/* Number of the ascending limits that lie below each element. */
INLINE void count_below(const float *restrict t, int64_t count, const float *restrict limits, int64_t levels,
                        uint8_t *restrict out) {
    if (levels == 15) {
        for (int64_t i = 0; i < count; i++) {
            int32_t above = 0;
            for (int k = 0; k < 15; k++)
                above += t[i] > limits[k];
            out[i] = (uint8_t)above;
        }
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t above = 0;
        for (int64_t half = (levels + 1) / 2; half; half /= 2)
            above += t[i] > limits[above + half - 1] ? half : 0;
        out[i] = (uint8_t)above;
    }
}

/* rows, size, by, multiply, limits, own (a table of limits for each group) -> codes */
CLONED double run_encode_table(const Argument *a) {
    const int64_t columns = a[0].columns, size = a[1].integer, levels = a[4].columns;
    const float *by = a[2].data, *limits = a[4].data;
    for (int64_t at = 0, row = 0; at < a[0].size; at = ++row * columns)
        for (int64_t first = at; first < at + columns; first += size, by++) {
            for (int64_t from = first, last = least(first + size, at + columns); from < last; from += CHUNK) {
                const int64_t count = least(CHUNK, last - from);
                float t[CHUNK];
                scaled((const float *)a[0].data + from, count, *by, a[3].integer, t);
                count_below(t, count, limits, levels, (uint8_t *)a[6].data + from);
            }
            limits += a[5].integer ? levels : 0;
        }
    return 0;
}

/* Levels of a group times its scale; infinite levels stay infinite. */
INLINE float product(float level, float scale) {
    const float r = level * scale;
    return fabsf(level) <= GREATEST ? clamped(r) : r;
}

enum { FEW = 16 /* levels that fit a vector register */ };

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* As `look_up`, for 16 products in a register. */
__attribute__((target("avx512f"))) static void look_up_512(const uint8_t *restrict q, int64_t count,
                                                           const float *restrict products, bool add, float *restrict out) {
    const __m512 table = _mm512_loadu_ps(products);
    int64_t i = 0;
    for (; i + FEW <= count; i += FEW) {
        const __m512i places = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(q + i)));
        const __m512 found = _mm512_permutexvar_ps(places, table);
        _mm512_storeu_ps(out + i, add ? _mm512_add_ps(_mm512_loadu_ps(out + i), found) : found);
    }
    for (; i < count; i++)
        out[i] = add ? out[i] + products[q[i]] : products[q[i]];
}

static bool has_512(void) { return __builtin_cpu_supports("avx512f"); }
#else
static bool has_512(void) { return false; }
#define look_up_512 look_up
#endif

static void look_up(const uint8_t *restrict q, int64_t count, const float *restrict products, bool add,
                    float *restrict out) {
    if (add)
        for (int64_t i = 0; i < count; i++)
            out[i] += products[q[i]];
    else
        for (int64_t i = 0; i < count; i++)
            out[i] = products[q[i]];
}

/* Levels of the codes of at most CHUNK elements, then their products: the second loop vectorises. */
INLINE void decode_chunk(const uint8_t *restrict q, int64_t count, float scale, const float *restrict table, bool add,
                         float *restrict out) {
    float level[CHUNK];
    for (int64_t i = 0; i < count; i++)
        level[i] = table[q[i]];
    if (add)
        for (int64_t i = 0; i < count; i++)
            out[i] += product(level[i], scale);
    else
        for (int64_t i = 0; i < count; i++)
            out[i] = product(level[i], scale);
}

/* codes, size, scales, levels, own (a table of levels for each group), add -> out */
CLONED double run_decode_table(const Argument *a) {
    const int64_t columns = a[6].columns, size = a[1].integer, levels = a[3].columns;
    const float *table = a[3].data;
    const bool add = a[5].integer, wide = has_512(), few = levels <= FEW;
    for (int64_t row = 0; row * columns < a[6].size; row++)
        for (int64_t group = 0; group < groups_of(columns, size); group++) {
            const uint8_t *q = (const uint8_t *)a[0].data + row * a[0].stride + group * size;
            const float scale = load_float((const char *)a[2].data + row * a[2].stride + 4 * group);
            float *out = (float *)a[6].data + row * columns + group * size, products[FEW] = {0};
            const int64_t width = width_of(columns, size, group);
            if (few) {
                for (int64_t k = 0; k < levels; k++)
                    products[k] = product(table[k], scale);
                (wide ? look_up_512 : look_up)(q, width, products, add, out);
            } else
                for (int64_t at = 0; at < width; at += CHUNK) {
#define CODES(COUNT) decode_chunk(q + at, COUNT, scale, table, add, out + at)
                    SHORT_COUNTS(least(CHUNK, width - at), CODES);
                }
            table += a[4].integer ? levels : 0;
        }
    return 0;
}
