/* Numbers of codes: decoded, added to others, or multiplied with others. */
#include "codecs.h"

enum { FEW = 16 /* levels that fit two vector registers */ };

/* Numbers of codes before scaling: those of a table, or (q ^ flip) - bias. */
typedef struct {
    const float *table;
    int64_t levels;
    uint8_t flip; /* 128 for int8, together with a bias of 128 */
    int32_t bias;
} Levels;

#if defined(__GNUC__) && !defined(__clang__)
typedef uint8_t EightBytes __attribute__((vector_size(8), aligned(1), may_alias));
typedef int32_t EightInts __attribute__((vector_size(32)));
typedef float EightFloats __attribute__((vector_size(32), aligned(4), may_alias));

/* Numbers of whole eights of codes below 16, from 16 levels. The result is how many these are. */
INLINE int64_t look_up(const uint8_t *q, int64_t count, const float *table, float *level) {
    const EightFloats low = *(const EightFloats *)table, high = *(const EightFloats *)(table + 8);
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        *(EightFloats *)(level + i) =
            __builtin_shuffle(low, high, __builtin_convertvector(*(const EightBytes *)(q + i), EightInts));
    return i;
}
#else
INLINE int64_t look_up(const uint8_t *q, int64_t count, const float *table, float *level) { return 0; }
#endif

INLINE void levels_of(const uint8_t *restrict q, int64_t count, const Levels *of, float *restrict level) {
    if (!of->table) {
        const int32_t bias = of->bias;
        const uint8_t flip = of->flip;
        for (int64_t i = 0; i < count; i++)
            level[i] = integer_level(q[i], flip, bias);
        return;
    }
    float few[FEW] = {0};
    const float *table = of->table;
    int64_t i = 0;
    if (of->levels <= FEW) {
        memcpy(few, table, sizeof(float) * (size_t)of->levels);
        i = look_up(q, count, few, level);
    }
    for (; i < count; i++)
        level[i] = table[q[i]];
}

INLINE float load_float(const char *from) {
    float x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Decoded elements of a group. Integers (not `of_table`) are finite. */
INLINE void scale_levels(const float *restrict level, int64_t count, float scale, float zero, bool of_table, bool add,
                         float *restrict out) {
#define ELEMENT (of_table ? decoded(level[i], scale, zero) : clamped((level[i] - zero) * scale))
    if (add)
        for (int64_t i = 0; i < count; i++)
            out[i] += ELEMENT;
    else
        for (int64_t i = 0; i < count; i++)
            out[i] = ELEMENT;
}

INLINE void decode_group(const float *level, int64_t count, float scale, float zero, bool of_table, bool add, float *out) {
#define DECODE(COUNT)                                                    \
    do {                                                                 \
        if (of_table)                                                    \
            scale_levels(level, COUNT, scale, 0.0f, true, add, out);     \
        else                                                             \
            scale_levels(level, COUNT, scale, zero, false, add, out);    \
    } while (0)
    COUNTS(count, DECODE);
}

/* codes, size, scales, zeros, bits, flip, bias, levels, add -> out. Levels of each group's own are for codes of a byte. */
CLONED double run_decode(const Argument *a) {
    const Argument *codes = a, *target = a + 9;
    const int64_t columns = target->columns, size = a[1].integer;
    const int bits = (int)a[4].integer;
    const float *zeros = a[3].data;
    float *out = target->data, level[NEAR];
    uint8_t buffer[NEAR];
    const bool own = a[7].size > a[7].columns, add = a[8].integer;
    Levels levels = {a[7].data, a[7].columns, (uint8_t)a[5].integer, (int32_t)a[6].integer};
    for (int64_t row = 0, from = 0, until = 0; row * columns < target->size; row++) {
        const uint8_t *q = (const uint8_t *)codes->data + row * codes->stride;
        const char *scales = (const char *)a[2].data + row * a[2].stride;
        for (int64_t at = 0, group = 0; at < columns;) {
            const int64_t place = row * columns + at, end = least((group + 1) * size, columns);
            if (place == until) { /* the levels of all elements before are used */
                from = place;
                until = least(place + NEAR, bits < 8 ? target->size : row * columns + (own ? end : columns));
                if (bits < 8)
                    unpack_codes((const uint8_t *)codes->data + place / 8 * bits, until - place, bits, buffer);
                levels_of(bits < 8 ? buffer : q + at, until - place, &levels, level);
            }
            const int64_t stop = least(end, at + until - place);
            decode_group(level + place - from, stop - at, load_float(scales + 4 * group), zeros ? *zeros : 0.0f, levels.table,
                         add, out + place);
            at = stop;
            if (at == end) {
                group++;
                zeros += zeros ? 1 : 0;
                levels.table += own ? levels.levels : 0;
            }
        }
    }
    return 0;
}

/* ---------------------------------------------------------------------------------------- rows of bytes */

/* Numbers of the codes of row `row`, between the columns `at` and `stop` of one group: int8 without a table. */
INLINE void decode_part(const Argument *a, int64_t row, int64_t at, int64_t stop, bool add, float *out) {
    const Levels levels = {a[3].data, a[3].size, 128, 128};
    const float scale = load_float((const char *)a[2].data + row * a[2].stride + 4 * (at / a[1].integer));
    float level[NEAR];
    levels_of((const uint8_t *)a[0].data + row * a[0].stride + at, stop - at, &levels, level);
    decode_group(level, stop - at, scale, 0.0f, levels.table, add, out);
}

#define EACH_PART(row, at, stop)                                                       \
    for (int64_t at = 0, stop; at < columns; at = stop)                                \
        if ((stop = least(least((at / size + 1) * size, columns), at + NEAR)) > at)

/* codes, size, scales, levels, y, places, weights: y[places[i]] += weights[i] row i */
CLONED double run_add_rows(const Argument *a) {
    const int64_t columns = a[0].columns, size = a[1].integer, *places = a[5].data;
    const float *weights = a[6].data;
    float part[NEAR];
    for (int64_t row = 0; row < a[5].size; row++)
        EACH_PART(row, at, stop) {
            float *into = (float *)a[4].data + places[row] * columns + at;
            decode_part(a, row, at, stop, !weights, weights ? part : into);
            for (int64_t i = 0; weights && i < stop - at; i++)
                into[i] += weights[row] * part[i];
        }
    return 0;
}

/* codes, size, scales, levels, x, places -> products: sums of x[places[i]] row i, whose terms are added in any order */
CLONED double run_multiply_rows(const Argument *a) {
    const int64_t columns = a[0].columns, size = a[1].integer, *places = a[5].data;
    float part[NEAR];
    for (int64_t row = 0; row < a[5].size; row++) {
        float total = 0;
        EACH_PART(row, at, stop) {
            const float *other = (const float *)a[4].data + places[row] * columns + at;
            decode_part(a, row, at, stop, false, part);
            DO_PRAGMA(omp simd reduction(+ : total))
            for (int64_t i = 0; i < stop - at; i++)
                total += other[i] * part[i];
        }
        ((float *)a[6].data)[row] = total;
    }
    return 0;
}
