/* Codes of small floats and of tables. */
#include "codecs.h"

/* rows, size, by, multiply, lowest, mantissa, sign bit, largest, stochastic, key, key -> codes.
 *
 * In units of the last place of its exponent, a number is an integer n. Exponents follow each other so that the bits are
 * (exponent 2^mantissa) + n, even if n carries into the next exponent. The unit is a power of two: multiplying by its
 * inverse is exact. */
CLONED double run_encode_float(const Argument *a) {
    const int64_t columns = a[0].columns, size = a[1].integer;
    const float *by = a[2].data, greatest = (float)a[7].number;
    const int32_t lowest = (int32_t)a[4].integer, mantissa = (int32_t)a[5].integer, sign_at = (int32_t)a[6].integer;
    const uint32_t key0 = (uint32_t)a[9].integer, key1 = (uint32_t)a[10].integer;
    for (int64_t at = 0, row = 0; at < a[0].size; at = ++row * columns)
        for (int64_t first = at; first < at + columns; first += size, by++)
            for (int64_t from = first, last = least(first + size, at + columns); from < last; from += CHUNK) {
                const int64_t count = least(CHUNK, last - from);
                uint8_t *restrict out = (uint8_t *)a[11].data + from;
                float t[CHUNK], n[CHUNK];
                scaled((const float *)a[0].data + from, count, *by, a[3].integer, t);
                for (int64_t i = 0; i < count; i++) {
                    const float value = fabsf(t[i]) < greatest ? fabsf(t[i]) : greatest;
                    int32_t exponent = bits_of(value) >> 23;
                    exponent = exponent > lowest ? exponent : lowest;
                    n[i] = value * float_of((254 - (exponent - mantissa)) << 23);
                }
                if (a[8].integer)
                    for (int64_t i = 0; i < count; i++)
                        n[i] = floorf(n[i] + uniform((uint64_t)(from + i), key0, key1));
                else
                    for (int64_t i = 0; i < count; i++)
                        n[i] = rintf(n[i]);
                for (int64_t i = 0; i < count; i++) {
                    const float value = fabsf(t[i]) < greatest ? fabsf(t[i]) : greatest;
                    int32_t exponent = bits_of(value) >> 23;
                    exponent = exponent > lowest ? exponent : lowest;
                    const int32_t bits = ((exponent - lowest) << mantissa) + (int32_t)n[i];
                    out[i] = (uint8_t)(bits | (int32_t)(((uint32_t)bits_of(t[i]) >> 31) << sign_at));
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

/* codes, size, scales, levels, own (a table of levels for each group), add -> out */
CLONED double run_decode_table(const Argument *a) {
    const int64_t columns = a[6].columns, size = a[1].integer, levels = a[3].columns;
    const float *table = a[3].data;
    for (int64_t row = 0; row * columns < a[6].size; row++)
        for (int64_t group = 0; group < groups_of(columns, size); group++) {
            const uint8_t *q = (const uint8_t *)a[0].data + row * a[0].stride + group * size;
            const float scale = load_float((const char *)a[2].data + row * a[2].stride + 4 * group);
            float *restrict out = (float *)a[6].data + row * columns + group * size;
            for (int64_t i = 0; i < width_of(columns, size, group); i++) {
                const float level = table[q[i]], r = level * scale, value = fabsf(level) <= GREATEST ? clamped(r) : r;
                out[i] = a[5].integer ? out[i] + value : value;
            }
            table += a[4].integer ? levels : 0;
        }
    return 0;
}
