/* Ranges and scales of groups, and codes of their elements. Each loop runs over at most NEAR elements before the next. */
#include "codecs.h"

#define EACH_GROUP(row, group, columns, size, rows)                               \
    for (int64_t row = 0, groups = groups_of(columns, size); row < (rows); row++) \
        for (int64_t group = 0; group < groups; group++)

/* ---------------------------------------------------------------------------------------- ranges of groups */

/* Map the bits of a float32 to integers in the order of the floats; applied again, it maps back. */
INLINE int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & MAGNITUDE); }

INLINE int32_t largest(const int32_t *bits, int64_t count) {
    int32_t most = 0;
    DO_PRAGMA(omp simd reduction(max : most))
    for (int64_t i = 0; i < count; i++) {
        const int32_t one = bits[i] & MAGNITUDE;
        most = one > most ? one : most;
    }
    return most;
}

INLINE void bounds(const int32_t *bits, int64_t count, int32_t *low, int32_t *high) {
    int32_t least_one = ordered(bits[0]), largest_one = least_one;
    DO_PRAGMA(omp simd reduction(min : least_one) reduction(max : largest_one))
    for (int64_t i = 0; i < count; i++) {
        const int32_t one = ordered(bits[i]);
        least_one = one < least_one ? one : least_one;
        largest_one = one > largest_one ? one : largest_one;
    }
    *low = ordered(least_one);
    *high = ordered(largest_one);
}

/* Bits of the element of largest magnitude, with its sign; the first of equal ones. Without a sign the bits of negative
 * numbers are above all others. */
INLINE int32_t farthest(const int32_t *bits, int64_t count) {
    int32_t high = bits[0];
    uint32_t low = (uint32_t)bits[0];
    DO_PRAGMA(omp simd reduction(max : high, low))
    for (int64_t i = 0; i < count; i++) {
        high = bits[i] > high ? bits[i] : high;
        low = (uint32_t)bits[i] > low ? (uint32_t)bits[i] : low;
    }
    const int32_t below = (int32_t)low & MAGNITUDE;
    if (high < 0 || (int32_t)low >= 0 || below != high)
        return (int32_t)low < 0 && below > high ? (int32_t)low : high;
    while ((*bits & MAGNITUDE) != high)
        bits++;
    return *bits;
}

INLINE int32_t largest_of(const int32_t *bits, int64_t count, bool peak) {
#define FIND(COUNT) return peak ? farthest(bits, COUNT) : largest(bits, COUNT)
    COUNTS(count, FIND);
}

#define RANGE(NAME, PEAK)                                                                                      \
    CLONED double run_##NAME(const Argument *a) {                                                              \
        const int64_t columns = a[0].columns, size = a[1].integer;                                             \
        const int32_t *bits = a[0].data;                                                                       \
        int32_t *out = a[2].data;                                                                              \
        EACH_GROUP(row, group, columns, size, columns ? a[0].size / columns : 0)                               \
            *out++ = largest_of(bits + row * columns + group * size, width_of(columns, size, group), PEAK);    \
        return 0;                                                                                              \
    }

RANGE(absmax, false)
RANGE(peak, true)

CLONED double run_minmax(const Argument *a) {
    const int64_t columns = a[0].columns, size = a[1].integer;
    int32_t *low = a[2].data, *high = a[3].data;
    EACH_GROUP(row, group, columns, size, columns ? a[0].size / columns : 0)
        bounds((const int32_t *)a[0].data + row * columns + group * size, width_of(columns, size, group), low++, high++);
    return 0;
}

/* ---------------------------------------------------------------------------------------- codes */

enum { INTEGER, FLOAT, TABLE };
enum { CODE_ARGUMENTS = 12 };

typedef struct {
    int kind;     /* INTEGER, FLOAT, or TABLE (NF4, k-means) */
    int rounding;
    int bits;     /* of a code in memory */
    int width;    /* FLOAT: bits of the format */
    int mantissa; /* FLOAT: bits of the mantissa; the exponent of its lowest octave is `lowest` */
    int lowest;
    float low, high, bias; /* INTEGER: range of integers, and what is added to them; FLOAT: the largest is `high` */
    uint32_t key0, key1;
    const float *limits; /* TABLE: the code is the number of the ascending limits that lie below an element */
    int64_t levels;      /* number of limits */
    bool own;            /* each group has limits of its own */
} Code;

/* From the arguments of a kernel that CODE stands for. */
static Code code_of(const Argument *a) {
    return (Code){
        .kind = (int)a[0].integer, .rounding = (int)a[1].integer, .bits = (int)a[2].integer, .width = (int)a[3].integer,
        .mantissa = (int)a[4].integer, .lowest = (int)a[5].integer,
        .low = (float)a[6].number, .high = (float)a[7].number, .bias = (float)a[8].number,
        .key0 = (uint32_t)a[9].integer, .key1 = (uint32_t)a[10].integer,
        .limits = a[11].data, .levels = a[11].columns, .own = a[11].size > a[11].columns,
    };
}

INLINE void count_below(const float *restrict t, int64_t count, const float *restrict limits, int64_t levels,
                        uint8_t *restrict out) {
#define COUNT_BELOW(LEVELS)                \
    for (int64_t i = 0; i < count; i++)    \
        out[i] = table_code(t[i], limits, LEVELS)
    if (levels == 15)
        COUNT_BELOW(15);
    else
        COUNT_BELOW((int32_t)levels);
}

/* Codes of elements in units of their scale, a byte each. `after` is added to integers; `number` is that of the first. */
INLINE void encode_near(const float *restrict t, int64_t count, const float *restrict after, uint64_t number,
                        const Code *code, uint8_t *restrict out) {
    const Code c = *code;
#define DRAWN uniform(number + (uint64_t)i, c.key0, c.key1)
#define INTEGERS(ROUNDING, RANDOM)         \
    for (int64_t i = 0; i < count; i++)    \
        out[i] = integer_code(rounded(t[i], ROUNDING, c.bias, RANDOM) + after[i], c.low, c.high, c.bias)
#define FLOATS(ROUNDING, RANDOM)           \
    for (int64_t i = 0; i < count; i++)    \
        out[i] = float_code(t[i], c.width, c.mantissa, c.lowest, c.high, ROUNDING, RANDOM)
    if (c.kind == TABLE)
        count_below(t, count, c.limits, c.levels, out);
    else if (c.kind == FLOAT && c.rounding == STOCHASTIC)
        FLOATS(STOCHASTIC, DRAWN);
    else if (c.kind == FLOAT)
        FLOATS(NEAREST_EVEN, 0);
    else if (c.rounding == NEAREST_EVEN)
        INTEGERS(NEAREST_EVEN, 0);
    else if (c.rounding == HALF_AWAY)
        INTEGERS(HALF_AWAY, 0);
    else if (c.rounding == HALF_UP)
        INTEGERS(HALF_UP, 0);
    else
        INTEGERS(STOCHASTIC, DRAWN);
}

INLINE void scale_group(const float *restrict r, int64_t count, float by, bool multiply, float *restrict t) {
    if (multiply)
        for (int64_t i = 0; i < count; i++)
            t[i] = in_units(r[i], by, true);
    else
        for (int64_t i = 0; i < count; i++)
            t[i] = in_units(r[i], by, false);
}

/* Codes that wait for a whole block, before they are packed. */
typedef struct {
    uint8_t *out;
    int64_t held;
    uint8_t codes[NEAR + BLOCK];
} Waiting;

INLINE void pack_waiting(Waiting *waiting, int bits, bool all) {
    const int64_t ready = all || bits == 8 ? waiting->held : waiting->held / BLOCK * BLOCK;
    pack_codes(waiting->codes, ready, bits, waiting->out);
    waiting->out += ready * bits / 8;
    waiting->held -= ready;
    memmove(waiting->codes, waiting->codes + ready, (size_t)waiting->held);
}

/* Codes of the `count` elements of whole groups, or of a part of one, which are neighbours. */
INLINE void encode_groups(const float *rows, int64_t count, int64_t size, const float *by, const float *zeros,
                          bool multiply, bool before, uint64_t number, const Code *code, Waiting *waiting) {
    static const float nothing[NEAR];
    float t[NEAR], zero[NEAR];
    for (int64_t at = 0; at < count; at += NEAR) {
        const int64_t some = least(NEAR, count - at);
        for (int64_t first = 0, group = 0; first < some; first += size, group++) {
            const int64_t width = least(size, some - first);
#define SCALE(COUNT) scale_group(rows + at + first, COUNT, by[group], multiply, t + first)
            COUNTS(width, SCALE);
            for (int64_t i = 0; zeros && i < width; i++)
                if (before)
                    t[first + i] += zeros[group];
                else
                    zero[first + i] = zeros[group];
        }
        encode_near(t, some, zeros && !before ? zero : nothing, number + (uint64_t)at, code, waiting->codes + waiting->held);
        waiting->held += some;
        pack_waiting(waiting, code->bits, false);
    }
}

/* Groups that are encoded together. */
INLINE int64_t batch_of(int64_t size, const Code *code) { return code->own || size > NEAR ? 1 : NEAR / size; }

/* rows, size, by, multiply, zeros, code -> codes */
CLONED double run_encode(const Argument *a) {
    const int64_t columns = a[0].columns, size = a[1].integer, groups = groups_of(columns, size);
    const float *rows = a[0].data, *by = a[2].data, *zeros = a[4].data;
    Code code = code_of(a + 5);
    const int64_t batch = batch_of(size, &code);
    Waiting waiting = {.out = a[5 + CODE_ARGUMENTS].data};
    bool before = false; /* zero points that are integers are added after rounding */
    for (int64_t i = 0; i < a[4].size; i++)
        before |= rintf(zeros[i]) != zeros[i];
    for (int64_t at = 0; at < a[0].size; at += columns)
        for (int64_t group = 0; group < groups; group += batch) {
            const int64_t first = at + group * size, some = least(batch, groups - group);
            const int64_t count = least(first + some * size, at + columns) - first;
            encode_groups(rows + first, count, size, by, zeros, a[3].integer, before, (uint64_t)first, &code, &waiting);
            by += some;
            zeros += zeros ? some : 0;
            code.limits += code.own ? code.levels : 0;
        }
    pack_waiting(&waiting, code.bits, true);
    return 0;
}

/* ---------------------------------------------------------------------------------------- scales and codes at once */

/* Formats of scales; OCTAVES are those of microscaling formats: the power of two of the largest element. */
enum { FP32, FP16, BF16, E8M0, E4M3, WHOLE, OCTAVES };

typedef struct {
    int form;
    bool inverse; /* codes are r times the inverse of the unrounded scale, not r divided by the stored one */
    bool peak;    /* scales have the sign of the farthest element, relative to that of `steps` */
    float steps;  /* a scale is the largest magnitude / steps */
    float top;    /* WHOLE: largest scale; OCTAVES: exponent of the code's largest number */
    int32_t limit; /* bits of the first scale that is not representable */
} Rule;

/* r / n of non-negative numbers; denormal results are rounded up. */
INLINE float quotient_of(float r, float n) {
    const float quotient = r / n;
    const int32_t bits = bits_of(quotient);
    return bits < 1 << PLACES && quotient * n < r ? float_of(bits + 1) : quotient;
}

/* Bits of a non-negative scale rounded to a format, with its value; with `up`, denormal ones are rounded up. */
INLINE int32_t stored_scale(float scale, int form, bool up, float top, float *value) {
    const int32_t bits = bits_of(scale);
    *value = scale;
    if (form == FP16)
        return small_float(scale < 65536.0f ? scale : 65536.0f, 10, 113, up, value);
    if (form == E4M3)
        return small_float(scale < 448.0f ? scale : 448.0f, 3, 121, up, value);
    if (form == BF16) {
        const int32_t half = up && bits < 1 << PLACES ? 0xFFFF : 0x7FFF + ((bits >> 16) & 1);
        const int32_t raw = (int32_t)(((uint32_t)bits + (uint32_t)half) >> 16);
        *value = float_of((int32_t)((uint32_t)raw << 16));
        return raw;
    }
    if (form == E8M0 || form == OCTAVES) {
        int32_t exponent = form == E8M0 ? (int32_t)(((uint32_t)bits + 0x7FFFFF) >> PLACES) : (bits >> PLACES) - (int32_t)top;
        exponent = (form == E8M0 && bits <= 0x00400000) || exponent < 0 ? 0 : (exponent > 254 ? 254 : exponent);
        *value = float_of(exponent ? exponent << PLACES : 0x00400000);
        return exponent;
    }
    if (form == WHOLE) {
        const float whole = rintf(scale < top ? scale : top);
        *value = up && whole == 0.0f && scale != 0.0f ? 1.0f : whole;
        return (int32_t)*value;
    }
    return bits;
}

/* Stored scales of groups with these largest elements, and by what to divide (or multiply) elements. The result has the
 * bits of the largest scale. */
INLINE int32_t make_scales(const int32_t *restrict most, int64_t count, const Rule *rule, int form, float gamma,
                           int32_t *restrict raw, float *restrict by) {
    const float divisor = gamma == 0.0f ? 1.0f : gamma;
    const bool inverse = rule->inverse, nested = gamma >= 0.0f, peak = rule->peak, octaves = form == OCTAVES;
    const int32_t steps = bits_of(rule->steps);
    const float size = fabsf(rule->steps), top = rule->top;
    int32_t worst = 0;
    for (int64_t i = 0; i < count; i++) {
        const float magnitude = float_of(most[i] & MAGNITUDE), ideal = octaves ? magnitude : quotient_of(magnitude, size);
        const float scale = nested ? ideal / divisor : ideal;
        const int32_t seen = bits_of(scale), sign = peak ? (most[i] ^ steps) & ~MAGNITUDE : 0;
        worst = seen > worst ? seen : worst;
        float value;
        const int32_t item = stored_scale(scale, form, !inverse, top, &value);
        raw[i] = item | (form == FP32 ? sign : (int32_t)((uint32_t)sign >> 16));
        value = nested ? clamped(gamma * value) : value;
        const float ideal_value = octaves ? value : ideal, factor = ideal_value == 0.0f ? 0.0f : clamped(1.0f / ideal_value);
        value = form >= E8M0 && form != E4M3 && form != WHOLE ? 1.0f / value : (value == 0.0f ? 1.0f : value);
        by[i] = float_of(bits_of(inverse ? factor : value) ^ sign);
    }
    return worst;
}

/* Write the scales of groups as items of their format. */
INLINE void store_scales(const int32_t *restrict raw, int64_t count, int form, char *restrict out) {
    typedef uint16_t Half __attribute__((aligned(1), may_alias));
    if (form == FP32)
        memcpy(out, raw, 4 * (size_t)count);
    else if (form == FP16 || form == BF16)
        for (int64_t i = 0; i < count; i++)
            ((Half *)out)[i] = (uint16_t)raw[i];
    else
        for (int64_t i = 0; i < count; i++)
            out[i] = (char)raw[i];
}

/* rows, size, steps, form, inverse, peak, top, gammas (scales of scales), groups for each, code -> scales, codes: both in
 * one pass, without stochastic rounding. The result is 0 if a scale is not representable. */
CLONED double run_quantize(const Argument *a) {
    static const int32_t limits[] = {
        [FP32] = INFINITE, [FP16] = 0x477FF000, [BF16] = 0x7F7F8000, [E8M0] = INFINITE, [E4M3] = 0x43E80001,
        [WHOLE] = INFINITE, [OCTAVES] = INFINITE,
    };
    const int64_t columns = a[0].columns, size = a[1].integer, groups = groups_of(columns, size);
    const Rule rule = {
        .steps = (float)a[2].number, .form = (int)a[3].integer, .inverse = a[4].integer, .peak = a[5].integer,
        .top = (float)a[6].number, .limit = limits[a[3].integer],
    };
    const float *rows = a[0].data, *gammas = a[7].data;
    const Code code = code_of(a + 9);
    const int64_t batch = batch_of(size, &code), each = gammas ? a[8].integer : groups;
    const Argument *scales = a + 9 + CODE_ARGUMENTS, *codes = scales + 1;
    const int64_t item = groups ? scales->columns / groups : 0; /* bytes */
    const bool multiply = rule.inverse || rule.form == E8M0 || rule.form == OCTAVES;
    Waiting waiting = {.out = codes->data};
    int32_t worst = 0, most[NEAR], raw[NEAR];
    float by[NEAR];
    for (int64_t row = 0; row * columns < a[0].size; row++) {
        char *items = (char *)scales->data + row * scales->stride;
        waiting.out = code.bits == 8 ? (uint8_t *)codes->data + row * codes->stride : waiting.out;
        for (int64_t start = 0, some; start < groups; start += some) {
            some = least(least(batch, groups - start), each - start % each);
            const float *part = rows + row * columns + start * size, gamma = gammas ? gammas[start / each] : -1.0f;
            for (int64_t group = 0; group < some; group++)
                most[group] = largest_of((const int32_t *)part + group * size, width_of(columns, size, start + group), rule.peak);
            int32_t seen = 0;
#define MAKE(FORM) case FORM: seen = make_scales(most, some, &rule, FORM, gamma, raw, by); break
            switch (rule.form) { MAKE(FP32); MAKE(FP16); MAKE(BF16); MAKE(E8M0); MAKE(E4M3); MAKE(WHOLE); MAKE(OCTAVES); }
            worst = seen > worst ? seen : worst;
            store_scales(raw, some, rule.form, items + start * item);
            const int64_t count = least((start + some) * size, columns) - start * size;
            encode_groups(part, count, size, by, NULL, multiply, false, 0, &code, &waiting);
        }
    }
    pack_waiting(&waiting, code.bits, true);
    return worst < rule.limit;
}
