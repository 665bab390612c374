/* Operators of rows: norms, sums over rows, gathered rows. */
#include "operators.h"

enum { ROWS = 64 /* of a partial sum, which limits the growth of rounding errors */, TILE = 4096 /* columns */ };

CLONED double run_sum_rows(const Argument *a) {
    const float *x = a[0].data;
    float *out = a[1].data;
    const int64_t columns = a[1].size, rows = columns ? a[0].size / columns : 0;
    memset(out, 0, (size_t)columns * sizeof *out);
    for (int64_t tile = 0; tile < columns; tile += TILE) {
        const int64_t width = least(TILE, columns - tile);
        for (int64_t first = 0; first < rows; first += ROWS) {
            float block[TILE] = {0};
            for (int64_t i = first; i < least(first + ROWS, rows); i++)
                for (int64_t j = 0; j < width; j++)
                    block[j] += x[i * columns + tile + j];
            for (int64_t j = 0; j < width; j++)
                out[tile + j] += block[j];
        }
    }
    return 0;
}

/* x, gain, bias, eps -> y, mean, rstd: LayerNorm of the rows of x; RMSNorm without bias and mean. */
CLONED double run_layer_norm(const Argument *a) {
    const float *gain = a[1].data, *bias = a[2].data, eps = (float)a[3].number;
    float *means = a[5].data, *rstds = a[6].data;
    const int64_t width = a[1].size;
    for (int64_t i = 0; i < a[6].size; i++) {
        const float *restrict row = (const float *)a[0].data + i * width;
        float *restrict y = (float *)a[4].data + i * width;
        float mean = 0, squares = 0;
        if (means) {
            SUM_OF(mean, width, row[j]);
            mean /= (float)width;
            means[i] = mean;
        }
        SUM_OF(squares, width, (row[j] - mean) * (row[j] - mean));
        const float rstd = norm_rstd(squares, (float)width, eps);
        rstds[i] = rstd;
        if (bias)
            INDEPENDENT for (int64_t j = 0; j < width; j++)
                y[j] = norm_unit(row[j], mean, rstd) * gain[j] + bias[j];
        else
            INDEPENDENT for (int64_t j = 0; j < width; j++)
                y[j] = norm_unit(row[j], mean, rstd) * gain[j];
    }
    return 0;
}

/* dy, x, gain, mean, rstd -> dx, dgain, dbias, with scratch memory of two rows. */
CLONED double run_layer_norm_backward(const Argument *a) {
    const float *restrict gain = a[2].data;
    const float *means = a[3].data, *rstds = a[4].data;
    float *restrict dgain = a[6].data, *dbias = a[7].data;
    const int64_t width = a[2].size, rows = a[4].size;
    float *restrict gains = a[8].data, *restrict biases = gains + width;
    memset(dgain, 0, (size_t)width * sizeof *dgain);
    if (dbias)
        memset(dbias, 0, (size_t)width * sizeof *dbias);
    for (int64_t first = 0; first < rows; first += ROWS) {
        memset(gains, 0, 2 * (size_t)width * sizeof *gains);
        for (int64_t i = first; i < least(first + ROWS, rows); i++) {
            const float *restrict upper = (const float *)a[0].data + i * width, *restrict row = (const float *)a[1].data + i * width;
            float *restrict dx = (float *)a[5].data + i * width;
            const float mean = means ? means[i] : 0.0f, rstd = rstds[i];
            float total = 0, along = 0;
            if (means)
                SUM_OF(total, width, upper[j] * gain[j]);
            SUM_OF(along, width, upper[j] * gain[j] * (row[j] - mean));
            total /= (float)width;
            along *= rstd / (float)width;
            INDEPENDENT for (int64_t j = 0; j < width; j++) {
                const float unit = norm_unit(row[j], mean, rstd);
                dx[j] = norm_gradient(upper[j] * gain[j], unit, total, along, rstd);
                gains[j] += upper[j] * unit;
                biases[j] += upper[j];
            }
        }
        for (int64_t j = 0; j < width; j++)
            dgain[j] += gains[j];
        if (dbias)
            for (int64_t j = 0; j < width; j++)
                dbias[j] += biases[j];
    }
    return 0;
}

/* 0 if all places are numbers of rows, else 1. The kernels below return it and change nothing if it is 1. */
INLINE double any_outside(Argument places, Argument table) {
    const uint64_t rows = table.columns ? (uint64_t)(table.size / table.columns) : 0;
    const uint64_t *numbers = places.data;
    uint64_t outside = 0;
    for (int64_t i = 0; i < places.size; i++)
        outside |= numbers[i] >= rows;
    return (double)outside;
}

/* table[places[i]] += rows[i], times weights[i] unless these are NULL. */
INLINE void add_rows(Argument table, Argument places, const float *rows, const float *weights) {
    const int64_t width = table.columns;
    for (int64_t i = 0; i < places.size; i++) {
        const float *restrict row = rows + i * width;
        float *restrict into = (float *)table.data + ((const int64_t *)places.data)[i] * width;
        if (weights)
            for (int64_t j = 0; j < width; j++)
                into[j] += weights[i] * row[j];
        else
            for (int64_t j = 0; j < width; j++)
                into[j] += row[j];
    }
}

/* dy, tokens -> out: the sum of the rows of each token. */
CLONED double run_embedding_gradient(const Argument *a) {
    if (any_outside(a[1], a[2]))
        return 1;
    memset(a[2].data, 0, (size_t)a[2].size * sizeof(float));
    add_rows(a[2], a[1], a[0].data, NULL);
    return 0;
}

/* y, places, rows, weights: y[places[i]] += weights[i] rows[i]. */
CLONED double run_add_rows(const Argument *a) {
    if (any_outside(a[1], a[0]))
        return 1;
    add_rows(a[0], a[1], a[2].data, a[3].data);
    return 0;
}

/* upper, places, weights, results -> rows[i] = weights[i] upper[places[i]], and its products with results[i]. */
CLONED double run_weighted_rows(const Argument *a) {
    const int64_t *places = a[1].data, width = a[0].columns;
    const float *weights = a[2].data;
    float *products = a[5].data;
    if (any_outside(a[1], a[0]))
        return 1;
    for (int64_t i = 0; i < a[1].size; i++) {
        const float *restrict source = (const float *)a[0].data + places[i] * width;
        const float *restrict result = (const float *)a[3].data + i * width;
        float *restrict row = (float *)a[4].data + i * width, weight = weights[i], total = 0;
        SUM_OF(total, width, source[j] * result[j]);
        products[i] = total;
        for (int64_t j = 0; j < width; j++)
            row[j] = weight * source[j];
    }
    return 0;
}

CLONED double run_row_products(const Argument *a) {
    const int64_t *places = a[1].data, width = a[0].columns;
    float *products = a[3].data;
    if (any_outside(a[1], a[0]))
        return 1;
    for (int64_t i = 0; i < a[1].size; i++) {
        const float *source = (const float *)a[0].data + places[i] * width, *row = (const float *)a[2].data + i * width;
        float total = 0;
        SUM_OF(total, width, source[j] * row[j]);
        products[i] = total;
    }
    return 0;
}

/* True for the `count` largest of each row; of equal ones the first, and NaN last. */
CLONED double run_top_k(const Argument *a) {
    const int64_t width = a[0].columns;
    uint8_t *mask = a[2].data;
    for (int64_t first = 0; first < a[0].size; first += width) {
        const float *row = (const float *)a[0].data + first;
        for (int32_t j = 0; j < width; j++) {
            const float score = row[j];
            int32_t before = 0;
            for (int32_t k = 0; k < width; k++) {
                const int earlier = k < j;
                before += (row[k] > score) | (earlier & (row[k] == score)) |
                          ((score != score) & (earlier | (row[k] == row[k])));
            }
            mask[first + j] = before < a[1].integer;
        }
    }
    return 0;
}
