/* The best intervals of sorted values, by dynamic programming, as reference_clusters.py finds them. */
#include "codecs.h"

/* Tables of one group: entry l * width + i has mean and squared distances of the values between place i and the middle
 * of its block of 2^l places. */
typedef struct {
    int height;
    int64_t width;
    double *restrict means, *restrict squares;
} Costs;

INLINE int length_of(uint64_t bits) { return bits ? 64 - __builtin_clzll(bits) : 0; }

/* One half of a block: `step` leads from its middle outwards. */
INLINE void sum_half(const double *values, int64_t half, int step, double *mean, double *square) {
    const double base = values[0];
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < half; i++) {
        const double off = values[i * step] - base, count = (double)(i + 1);
        sum += off;
        squares += off * off;
        const double shift = sum / count, rest = squares - shift * shift * count;
        mean[i * step] = base + shift;
        square[i * step] = rest > 0 ? rest : 0;
    }
}

INLINE void make_tables(const double *points, int64_t n, const Costs *costs) {
    for (int64_t i = 0; i < costs->width; i++) {
        costs->means[i] = points[i < n ? i : n - 1];
        costs->squares[i] = 0;
    }
    for (int level = 1; level <= costs->height; level++) {
        const int64_t half = (int64_t)1 << (level - 1);
        double *means = costs->means + level * costs->width, *squares = costs->squares + level * costs->width;
        for (int64_t middle = half; middle < costs->width; middle += 2 * half) {
            sum_half(costs->means + middle - 1, half, -1, means + middle - 1, squares + middle - 1);
            sum_half(costs->means + middle, half, 1, means + middle, squares + middle);
        }
    }
}

/* totals[i]: least cost of the values before first + i, and cost of one interval from there to `end` (exclusive). All
 * starts from `first` to `stop` (exclusive) have one level with the last value. */
INLINE void costs_of_level(const Costs *costs, const double *restrict least_costs, int64_t first, int64_t stop,
                           int64_t end, int level, double *restrict totals) {
    const int64_t last = end - 1, middle = level ? (last >> (level - 1)) << (level - 1) : last;
    const double *means = costs->means + level * costs->width, *squares = costs->squares + level * costs->width;
    const double mean = means[last], square = squares[last];
    const int32_t after = (int32_t)(end - middle);
    for (int64_t at = first; at < stop; at++) {
        const double apart = mean - means[at];
        const double weight = (double)(int32_t)(middle - at) * after / (double)(int32_t)(end - at);
        totals[at - first] = least_costs[at] + (squares[at] + square + apart * apart * weight);
    }
}

/* As costs_of_level, for starts of any level. */
INLINE void total_costs(const Costs *costs, const double *restrict least_costs, int64_t first, int64_t stop,
                        int64_t end, double *restrict totals) {
    const int64_t last = end - 1;
    for (int64_t at = first; at < stop;) {
        const int level = length_of((uint64_t)(at ^ last));
        const int64_t next = level ? least((last >> (level - 1)) << (level - 1), stop) : stop;
        costs_of_level(costs, least_costs, at, next, end, level, totals + (at - first));
        at = next;
    }
}

/* Number of the first of the least totals, none of which is negative: their bits are in the order of their values. */
INLINE int64_t first_least(const double *restrict totals, int64_t count) {
    const int64_t *bits = (const int64_t *)totals;
    int64_t best = INT64_MAX, i = 0;
    DO_PRAGMA(omp simd reduction(min : best))
    for (int64_t k = 0; k < count; k++)
        best = bits[k] < best ? bits[k] : best;
    while (i < count - 1 && bits[i] != best)
        i++;
    return i;
}

typedef struct {
    int64_t low, high, first, last; /* ends low..high, whose best starts are in first..last */
} Span;

enum { DEPTH = 64 /* spans that wait: one for each halving of a range */ };

/* Least costs of the first i values in `clusters` intervals, and starts of the last of these, for i up to `most`. */
INLINE void next_row(const Costs *costs, const double *least_costs, int64_t clusters, int64_t most, double *row,
                     int32_t *start, double *totals) {
    Span waiting[DEPTH] = {{clusters, most, clusters - 1, most - 1}};
    for (int count = 1; count;) {
        const Span span = waiting[--count];
        const int64_t end = (span.low + span.high) / 2, stop = least(span.last, end - 1) + 1;
        total_costs(costs, least_costs, span.first, stop, end, totals);
        const int64_t best = first_least(totals, stop - span.first), chosen = span.first + best;
        row[end] = totals[best];
        start[end] = (int32_t)chosen;
        if (span.low < end)
            waiting[count++] = (Span){span.low, end - 1, span.first, chosen};
        if (end < span.high)
            waiting[count++] = (Span){end + 1, span.high, chosen, span.last};
    }
}

/* points, k, height -> tables, rows, starts (all three are scratch memory), edges */
CLONED double run_optimal_edges(const Argument *a) {
    const int64_t n = a[0].columns, k = a[1].integer;
    const Costs costs = {
        .height = (int)a[2].integer, .width = a[3].columns,
        .means = a[3].data, .squares = (double *)a[3].data + a[3].size / 2,
    };
    int32_t *starts = a[5].data;
    int64_t *edges = a[6].data;
    for (int64_t at = 0; at < a[0].size; at += n, edges += k + 1) {
        double *before = a[4].data, *row = before + n + 1, *const totals = row + n + 1;
        make_tables((const double *)a[0].data + at, n, &costs);
        before[0] = 0;
        for (int64_t end = 1; end <= n; end++)
            total_costs(&costs, before, 0, 1, end, before + end);
        for (int64_t clusters = 2; clusters <= k; clusters++) {
            next_row(&costs, before, clusters, n - (k - clusters), row, starts + clusters * (n + 1) - n - 1, totals);
            double *const other = before;
            before = row, row = other;
        }
        edges[0] = 0, edges[k] = n;
        for (int64_t clusters = k; clusters > 1; clusters--)
            edges[clusters - 1] = starts[(clusters - 1) * (n + 1) + edges[clusters]];
    }
    return 0;
}
