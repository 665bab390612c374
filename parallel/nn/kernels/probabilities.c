/* Softmax, attention and cross entropy. */
#include "operators.h"

/* Map float32 to int32 of the same order and back: maxima of integers vectorise, maxima of floats do not. */
INLINE int32_t ordered(float x) {
    const int32_t bits = bits_of(x);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

INLINE float from_ordered(int32_t x) { return float_of(x ^ ((x >> 31) & 0x7FFFFFFF)); }

/* Largest of `scale` times the elements of a row; arbitrary if any is NaN. */
INLINE float largest(const float *row, int64_t count, float scale) {
    int32_t top = -0x7FFFFFFF;
    DO_PRAGMA(omp simd reduction(max : top))
    for (int64_t j = 0; j < count; j++) {
        const int32_t one = ordered(row[j] * scale);
        top = one > top ? one : top;
    }
    return from_ordered(top);
}

enum { PART = 1024 /* terms that are added one to the other: limits rounding errors for all lengths of vectors */ };

/* Write exp(scale row - top) to `into`, or nothing if it is NULL; the result is the sum. */
INLINE float exponentials(const float *row, float *into, int64_t count, float scale, float top) {
    float total = 0;
    for (int64_t first = 0; first < count; first += PART) {
        const int64_t end = count - first < PART ? count : first + PART;
        float part = 0;
        DO_PRAGMA(omp simd reduction(+ : part))
        for (int64_t j = first; j < end; j++) {
            const float e = softmax_term(row[j], scale, top);
            if (into)
                into[j] = e;
            part += e;
        }
        total += part;
    }
    return total;
}

INLINE float sum_of(const float *row, int64_t count) {
    float total = 0;
    for (int64_t first = 0; first < count; first += PART) {
        const int64_t end = count - first < PART ? count : first + PART;
        float part = 0;
        DO_PRAGMA(omp simd reduction(+ : part))
        for (int64_t j = first; j < end; j++)
            part += row[j];
        total += part;
    }
    return total;
}

INLINE void clear(float *row, int64_t count) {
    if (count > 0)
        memset(row, 0, (size_t)count * sizeof *row);
}

/* Softmax of `scale` times the elements `first` to `last` of a row, 0 elsewhere; the result is the log of the sum. */
INLINE float softmax_row(float *row, int64_t keys, int64_t first, int64_t last, float scale) {
    if (first >= last) {
        clear(row, keys);
        return -INFINITY;
    }
    const float top = largest(row + first, last - first, scale);
    const float total = exponentials(row + first, row + first, last - first, scale, top), factor = 1.0f / total;
    for (int64_t j = first; j < last; j++)
        row[j] *= factor;
    clear(row, first);
    clear(row + last, keys - last);
    return log_sum_of(total, top);
}

/* scores, queries, scale, first: row i sees first + i % queries + 1 keys. */
CLONED double run_causal_softmax(const Argument *a) {
    const int64_t keys = a[0].columns, queries = a[1].integer, first = a[3].integer;
    const float scale = (float)a[2].number;
    for (int64_t i = 0; i * keys < a[0].size; i++) {
        const int64_t seen = first + i % queries + 1;
        softmax_row((float *)a[0].data + i * keys, keys, 0, least(seen, keys), scale);
    }
    return 0;
}

/* dp, p, scale: dp = (dp - sum(dp p)) p scale. */
CLONED double run_softmax_backward(const Argument *a) {
    const int64_t keys = a[0].columns;
    const float scale = (float)a[2].number;
    for (int64_t first = 0; first < a[0].size; first += keys) {
        float *restrict row = (float *)a[0].data + first;
        const float *restrict p = (const float *)a[1].data + first;
        float along = 0;
        SUM_OF(along, keys, row[j] * p[j]);
        for (int64_t j = 0; j < keys; j++)
            row[j] = softmax_gradient(row[j], p[j], along, scale);
    }
    return 0;
}

INLINE int64_t within(int64_t key, int64_t keys) { return key < 0 ? 0 : least(key, keys); }

/* scores, scale, low, high -> log_sum: row i sees the keys from low[i % n] up to high[i % n]. */
CLONED double run_visible_softmax(const Argument *a) {
    const int64_t keys = a[0].columns, *low = a[2].data, *high = a[3].data, queries = a[2].size;
    const float scale = (float)a[1].number;
    float *log_sum = a[4].data;
    for (int64_t i = 0; i < a[4].size; i++) {
        const int64_t first = within(low[i % queries], keys), last = within(high[i % queries], keys);
        log_sum[i] = softmax_row((float *)a[0].data + i * keys, keys, first, last, scale);
    }
    return 0;
}

CLONED double run_visible_probabilities(const Argument *a) {
    const int64_t keys = a[0].columns, *low = a[2].data, *high = a[3].data, queries = a[2].size;
    const float scale = (float)a[1].number, *log_sum = a[4].data;
    for (int64_t i = 0; i < a[4].size; i++) {
        float *row = (float *)a[0].data + i * keys;
        const int64_t first = within(low[i % queries], keys), last = within(high[i % queries], keys);
        clear(row, first);
        for (int64_t j = first; j < last; j++)
            row[j] = softmax_term(row[j], scale, log_sum[i]);
        clear(row + last, keys - last);
    }
    return 0;
}

CLONED double run_attention_gradient(const Argument *a) {
    const int64_t keys = a[0].columns;
    const float scale = (float)a[2].number, *sums = a[3].data;
    for (int64_t i = 0; i < a[3].size; i++) {
        float *restrict row = (float *)a[0].data + i * keys;
        const float *restrict p = (const float *)a[1].data + i * keys;
        for (int64_t j = 0; j < keys; j++)
            row[j] = softmax_gradient(row[j], p[j], sums[i], scale);
    }
    return 0;
}

/* out, log_sum, part, part_log_sum: combine the results of attention over two sets of keys. */
CLONED double run_merge_attention(const Argument *a) {
    const int64_t width = a[0].columns;
    float *log_sum = a[1].data;
    const float *others = a[3].data;
    for (int64_t i = 0; i < a[1].size; i++) {
        const float one = log_sum[i], other = others[i];
        if (other == -INFINITY)
            continue;
        const float top = one > other ? one : other, e = expf(-fabsf(one - other));
        log_sum[i] = top + log1pf(e);
        const float share = (other >= one ? 1.0f : e) / (1.0f + e);
        float *restrict row = (float *)a[0].data + i * width;
        const float *restrict part = (const float *)a[2].data + i * width;
        INDEPENDENT for (int64_t j = 0; j < width; j++)
            row[j] += share * (part[j] - row[j]);
    }
    return 0;
}

/* scores, targets -> log_sum; the result is the sum of the losses of rows with a target from 0 on. */
CLONED double run_softmax_cross_entropy(const Argument *a) {
    const int64_t classes = a[0].columns, *targets = a[1].data;
    float *log_sum = a[2].data;
    double loss = 0;
    for (int64_t i = 0; i < a[2].size; i++) {
        const float *row = (const float *)a[0].data + i * classes;
        const float top = largest(row, classes, 1.0f);
        const float total = exponentials(row, NULL, classes, 1.0f, top);
        log_sum[i] = log_sum_of(total, top);
        if (targets[i] >= 0)
            loss += (double)(log_sum[i] - row[targets[i]]);
    }
    return loss;
}

CLONED double run_softmax_cross_entropy_backward(const Argument *a) {
    const int64_t classes = a[1].columns, *targets = a[2].data;
    const float scale = (float)a[0].number, *log_sum = a[3].data;
    for (int64_t i = 0; i < a[3].size; i++) {
        const float *restrict row = (const float *)a[1].data + i * classes, away = log_sum[i];
        float *restrict into = (float *)a[4].data + i * classes;
        const float factor = targets[i] < 0 ? 0.0f : scale;
        INDEPENDENT for (int64_t j = 0; j < classes; j++)
            into[j] = cross_entropy_slope(row[j], away, 0.0f, factor);
        if (targets[i] >= 0)
            into[targets[i]] = cross_entropy_slope(row[targets[i]], away, 1.0f, factor);
    }
    return 0;
}

enum {
    ELEMENTS = 2048, /* of the rows that `softmax` treats together: short rows would leave most of a vector empty */
    SHORT = 16,      /* rows of fewer elements are read one by one */
};

CLONED double run_softmax(const Argument *a) {
    const int64_t width = a[0].columns, rows = a[0].size / width, step = width < ELEMENTS ? ELEMENTS / width : 1;
    for (int64_t begin = 0; begin < rows; begin += step) {
        const int64_t end = begin + step < rows ? begin + step : rows;
        float *y = a[1].data;
        for (int64_t i = begin; i < end; i++) {
            const float *restrict row = (const float *)a[0].data + i * width;
            float *restrict into = y + i * width, top = row[0];
            if (width < SHORT)
                for (int64_t j = 1; j < width; j++)
                    top = row[j] > top ? row[j] : top;
            else
                top = largest(row, width, 1.0f);
            for (int64_t j = 0; j < width; j++)
                into[j] = row[j] - top;
        }
        INDEPENDENT for (int64_t j = begin * width; j < end * width; j++)
            y[j] = exp_down(y[j]);
        for (int64_t i = begin; i < end; i++) {
            float *row = y + i * width, total = 0;
            if (width < SHORT)
                for (int64_t j = 0; j < width; j++)
                    total += row[j];
            else
                total = sum_of(row, width);
            for (int64_t j = 0; j < width; j++)
                row[j] /= total;
        }
    }
    return 0;
}
