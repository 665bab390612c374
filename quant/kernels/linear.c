/* Ranges of groups, and linear codes. */
#include "ranges.h"

#define EACH_GROUP(row, group, columns, size, rows)                      \
    for (int64_t row = 0, groups = groups_of(columns, size); row < (rows); row++) \
        for (int64_t group = 0; group < groups; group++)

#define RANGE(NAME, FIND)                                                                  \
    CLONED double run_##NAME(const Argument *a) {                                          \
        const int64_t columns = a[0].columns, size = a[1].integer;                         \
        int32_t *out = a[2].data;                                                          \
        EACH_GROUP(row, group, columns, size, columns ? a[0].size / columns : 0)           \
            *out++ = FIND((const int32_t *)a[0].data + row * columns + group * size, width_of(columns, size, group)); \
        return 0;                                                                          \
    }

RANGE(absmax, largest)
RANGE(peak, farthest)

CLONED double run_minmax(const Argument *a) {
    const int64_t columns = a[0].columns, size = a[1].integer;
    int32_t *low = a[2].data, *high = a[3].data;
    EACH_GROUP(row, group, columns, size, columns ? a[0].size / columns : 0)
        bounds((const int32_t *)a[0].data + row * columns + group * size, width_of(columns, size, group), low++, high++);
    return 0;
}

/* Parameters of a linear code: round(r / by) + zero, from `low` to `high`, plus `bias`. */
typedef struct {
    int multiply, rounding, shift, nibbles;
    float low, high, bias;
    uint32_t key0, key1;
} Linear;

INLINE uint8_t byte_of(float t, const Linear *code) {
    t = t < code->low ? code->low : t;
    t = t > code->high ? code->high : t;
    return (uint8_t)(int32_t)(t + code->bias);
}

/* Codes of at most CHUNK elements, a byte each; `number` is that of the first. */
INLINE void encode_chunk(const float *restrict r, int64_t count, float by, float zero, uint64_t number,
                         const Linear *code, uint8_t *restrict out) {
    if (code->rounding == NEAREST_EVEN && code->shift != BEFORE) {
        if (code->multiply)
            for (int64_t i = 0; i < count; i++)
                out[i] = byte_of(rintf(r[i] * by) + zero, code);
        else
            for (int64_t i = 0; i < count; i++)
                out[i] = byte_of(rintf(r[i] / by) + zero, code);
        return;
    }
    if (code->rounding == HALF_UP && code->shift == PLAIN && code->multiply) {
        for (int64_t i = 0; i < count; i++)
            out[i] = byte_of(floorf(r[i] * by + (code->bias + 0.5f)) - code->bias, code);
        return;
    }
    float t[CHUNK];
    scaled(r, count, by, code->multiply, t);
    if (code->shift == BEFORE)
        for (int64_t i = 0; i < count; i++)
            t[i] += zero;
    switch (code->rounding) {
    case NEAREST_EVEN:
        for (int64_t i = 0; i < count; i++)
            t[i] = rintf(t[i]);
        break;
    case HALF_AWAY:
        for (int64_t i = 0; i < count; i++) {
            const float size = fabsf(t[i]), down = floorf(size);
            t[i] = copysignf(down + (size - down >= 0.5f ? 1.0f : 0.0f), t[i]);
        }
        break;
    case HALF_UP:
        for (int64_t i = 0; i < count; i++)
            t[i] = floorf(t[i] + (code->bias + 0.5f)) - code->bias;
        break;
    default:
        for (int64_t i = 0; i < count; i++)
            t[i] = floorf(t[i] + uniform(number + (uint64_t)i, code->key0, code->key1));
    }
    if (code->shift == AFTER)
        for (int64_t i = 0; i < count; i++)
            t[i] += zero;
    for (int64_t i = 0; i < count; i++)
        out[i] = byte_of(t[i], code);
}

INLINE void encode_span(const float *r, int64_t count, float by, float zero, uint64_t number, const Linear *code,
                        uint8_t *out) {
    for (int64_t at = 0; at < count; at += code->nibbles ? BLOCK : CHUNK) {
        if (!code->nibbles) {
            encode_chunk(r + at, least(CHUNK, count - at), by, zero, number + (uint64_t)at, code, out + at);
            continue;
        }
        uint8_t codes[BLOCK];
        encode_chunk(r + at, BLOCK, by, zero, number + (uint64_t)at, code, codes);
        for (int i = 0; i < BLOCK / 2; i++)
            out[at / 2 + i] = (uint8_t)(codes[i] | (codes[BLOCK / 2 + i] << 4));
    }
}

INLINE void encode_group(const float *r, int64_t count, float by, float zero, uint64_t number, const Linear *code,
                         uint8_t *out) {
#define ENCODE(COUNT) encode_span(r, COUNT, by, zero, number, code, out)
    SHORT_COUNTS(count, ENCODE);
}

/* rows, size, by, zeros, multiply, rounding, shift, low, high, bias, key, key, nibbles -> codes */
CLONED double run_encode_linear(const Argument *a) {
    const int64_t columns = a[0].columns, size = a[1].integer;
    const float *rows = a[0].data, *by = a[2].data, *zeros = a[3].data;
    const Linear code = {
        .multiply = (int)a[4].integer, .rounding = (int)a[5].integer, .shift = (int)a[6].integer,
        .low = (float)a[7].number, .high = (float)a[8].number, .bias = (float)a[9].number,
        .key0 = (uint32_t)a[10].integer, .key1 = (uint32_t)a[11].integer, .nibbles = (int)a[12].integer,
    };
    uint8_t *out = a[13].data;
    EACH_GROUP(row, group, columns, size, columns ? a[0].size / columns : 0) {
        const int64_t at = row * columns + group * size;
        const float zero = code.shift == PLAIN ? 0.0f : *zeros++;
        encode_group(rows + at, width_of(columns, size, group), *by++, zero, (uint64_t)at, &code,
                     out + (code.nibbles ? at / 2 : at));
    }
    return 0;
}

/* r / n of non-negative numbers; denormal results are rounded up. */
INLINE float quotient_of(float r, float n) {
    const float quotient = r / n;
    const int32_t bits = bits_of(quotient);
    return bits < NORMAL && quotient * n < r ? float_of(bits + 1) : quotient;
}

/* Bits of a non-negative scale rounded to a format, with its value; with `up`, denormal ones are rounded up. */
INLINE int32_t stored_scale(float scale, int form, bool up, float *value) {
    const int32_t bits = bits_of(scale);
    if (form == FP16) {
        const int32_t exponent = (bits >> 23) > 113 ? bits >> 23 : 113;
        const float unit = float_of((exponent - 10) << 23);
        float n = scale / unit;
        n = up && n < 1024.0f ? ceilf(n) : rintf(n);
        *value = n * unit;
        return ((exponent - 113) << 10) + (int32_t)n;
    }
    if (form == BF16) {
        const int32_t half = up && bits < NORMAL ? 0xFFFF : 0x7FFF + ((bits >> 16) & 1);
        const int32_t raw = (int32_t)(((uint32_t)bits + (uint32_t)half) >> 16);
        *value = float_of((int32_t)((uint32_t)raw << 16));
        return raw;
    }
    *value = scale;
    return bits;
}

enum { NEAR = 1 << 13 /* elements that stay in the L1 cache between two passes */ };

/* rows, size, steps, form, inverse, peak, rounding, low, high, bias, nibbles -> scales, codes: scales and codes in one
 * pass, without stochastic rounding. The result is 0 if a scale overflows. */
CLONED double run_quantize_linear(const Argument *a) {
    const int64_t columns = a[0].columns, size = a[1].integer, batch = NEAR / size > 1 ? NEAR / size : 1;
    const float *rows = a[0].data, steps = (float)a[2].number;
    const int form = (int)a[3].integer;
    const bool inverse = a[4].integer, peak = a[5].integer;
    const Linear code = {
        .multiply = inverse, .rounding = (int)a[6].integer, .shift = PLAIN, .nibbles = (int)a[10].integer,
        .low = (float)a[7].number, .high = (float)a[8].number, .bias = (float)a[9].number,
    };
    const int32_t infinite = form == FP16 ? 0x7C00 : form == BF16 ? 0x7F80 : INFINITE;
    const int64_t groups = groups_of(columns, size), count = columns ? a[0].size / columns : 0;
    int32_t worst = 0, most[NEAR];
    float by[NEAR];
    for (int64_t row = 0; row < count; row++) {
        char *scales = (char *)a[11].data + row * a[11].stride;
        uint8_t *codes = (uint8_t *)a[12].data + row * a[12].stride;
        for (int64_t start = 0; start < groups; start += batch) {
            const int64_t some = least(batch, groups - start);
            for (int64_t group = 0; group < some; group++) {
                const int32_t *bits = (const int32_t *)rows + row * columns + (start + group) * size;
                const int64_t width = width_of(columns, size, start + group);
                most[group] = peak ? farthest(bits, width) : largest(bits, width);
            }
            for (int64_t group = 0; group < some; group++) {
                const int32_t magnitude = most[group] & MAGNITUDE;
                float scale = quotient_of(float_of(magnitude), fabsf(steps)), value;
                const int32_t raw = stored_scale(scale, form, !inverse, &value);
                const int32_t seen = magnitude < INFINITE ? raw : infinite;
                worst = seen > worst ? seen : worst;
                const bool down = peak && (most[group] < 0) != (steps < 0);
                const uint32_t item = (uint32_t)raw | (down ? (form == FP32 ? 0x80000000u : 0x8000u) : 0u);
                if (form == FP32)
                    memcpy(scales + 4 * (start + group), &item, 4);
                else
                    memcpy(scales + 2 * (start + group), &(uint16_t){(uint16_t)item}, 2);
                value = down ? -value : value;
                scale = down ? -scale : scale;
                by[group] = inverse ? (scale == 0.0f ? 0.0f : clamped(1.0f / scale)) : (value == 0.0f ? 1.0f : value);
            }
            for (int64_t group = 0; group < some; group++) {
                const int64_t at = (start + group) * size;
                encode_group(rows + row * columns + at, width_of(columns, size, start + group), by[group], 0.0f, 0, &code,
                             codes + (code.nibbles ? at / 2 : at));
            }
        }
    }
    return worst < infinite;
}

INLINE float decoded(int32_t q, float scale, float zero) { return clamped(((float)q - zero) * scale); }

INLINE void decode_16(Ints q, float scale, float zero, bool add, float *out) {
    const Floats r = (__builtin_convertvector(q, Floats) - zero) * scale;
    if (add)
        *(Floats *)out += r;
    else
        *(Floats *)out = r;
}

/* True if no code is decoded to infinity. */
INLINE bool is_safe(float scale, float zero) { return fabsf(scale) * (256.0f + fabsf(zero)) <= GREATEST; }

INLINE void decode_span(const uint8_t *restrict q, int64_t count, float scale, float zero, int32_t bias, bool is_signed,
                        bool add, float *restrict out) {
    if (is_signed && add)
        for (int64_t i = 0; i < count; i++)
            out[i] += decoded((int8_t)q[i], scale, zero);
    else if (is_signed)
        for (int64_t i = 0; i < count; i++)
            out[i] = decoded((int8_t)q[i], scale, zero);
    else if (add)
        for (int64_t i = 0; i < count; i++)
            out[i] += decoded((int32_t)q[i] - bias, scale, zero);
    else
        for (int64_t i = 0; i < count; i++)
            out[i] = decoded((int32_t)q[i] - bias, scale, zero);
}

/* codes, size, scales, zeros, signed, bias, add -> out */
CLONED double run_decode_bytes(const Argument *a) {
    const int64_t columns = a[7].columns, size = a[1].integer;
    const float *zeros = a[3].data;
    const bool is_signed = a[4].integer, add = a[6].integer;
    EACH_GROUP(row, group, columns, size, columns ? a[7].size / columns : 0) {
        const uint8_t *q = (const uint8_t *)a[0].data + row * a[0].stride + group * size;
        const float scale = load_float((const char *)a[2].data + row * a[2].stride + 4 * group), zero = zeros ? *zeros++ : 0.0f;
        float *out = (float *)a[7].data + row * columns + group * size;
#define DECODE(COUNT) decode_span(q, COUNT, scale, zero, (int32_t)a[5].integer, is_signed, add, out)
        SHORT_COUNTS(width_of(columns, size, group), DECODE);
    }
    return 0;
}

/* packed, size, scales, zeros, bias, add -> out: 4-bit codes in groups of whole blocks */
CLONED double run_decode_nibbles(const Argument *a) {
    const int64_t size = a[1].integer;
    const float *scales = a[2].data, *zeros = a[3].data;
    const int32_t bias = (int32_t)a[4].integer;
    for (int64_t group = 0; group < a[2].size; group++)
        for (int64_t at = group * size; at < (group + 1) * size; at += BLOCK) {
            const uint8_t *packed = (const uint8_t *)a[0].data + at / 2;
            float *out = (float *)a[6].data + at;
            const float scale = scales[group], zero = zeros ? zeros[group] : 0.0f;
            const Bytes both = *(const Bytes *)packed;
            const Ints low = __builtin_convertvector(both & 15, Ints) - bias;
            const Ints high = __builtin_convertvector(both >> 4, Ints) - bias;
            if (is_safe(scale, zero)) {
                decode_16(low, scale, zero, a[5].integer, out);
                decode_16(high, scale, zero, a[5].integer, out + 16);
            } else
                for (int i = 0; i < BLOCK; i++) {
                    const float r = decoded(i < 16 ? low[i % 16] : high[i % 16], scale, zero);
                    out[i] = a[5].integer ? out[i] + r : r;
                }
        }
    return 0;
}
