"""CUDA source of kernels of rows: norms, softmax of attention, cross entropy. One warp a row. See `device_source`."""

WARPS = """
// Rows of a matrix, one for each warp, and the packs of a row, one after the other for each thread of the warp.
#define ROWS(row, n) \\
    for (long long row = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; row < (n); \\
         row += (long long)gridDim.x * (THREADS / 32))
#define PACKS(j, n) for (long long j = threadIdx.x % 32; j < (n); j += 32)

__device__ inline W warp_sum(W x) {
    for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, lanes);
    return x;
}
__device__ inline W warp_max(W x) {
    for (int lanes = 16; lanes; lanes /= 2) {
        const W other = __shfl_xor_sync(0xFFFFFFFF, x, lanes);
        x = other > x ? other : x;
    }
    return x;
}
"""

NORM = """
KERNEL layer_norm(const T* x, const T* gain, const T* bias, T* y, W* means, W* rstds, long long rows,
                  long long columns, double eps, long long centred) {
    const W width = W(columns * WIDTH);
    ROWS(row, rows) {
        const T* from = x + row * columns * WIDTH;
        W mean = 0, squares = 0;
        if (centred) {
            PACKS(j, columns) {
                const Pack<T> a = load(from, j);
                EACH(k) mean += wide(a.values[k]);
            }
            mean = warp_sum(mean) / width;
        }
        PACKS(j, columns) {
            const Pack<T> a = load(from, j);
            EACH(k) squares += (wide(a.values[k]) - mean) * (wide(a.values[k]) - mean);
        }
        const W rstd = norm_rstd(warp_sum(squares), width, (W)eps);
        PACKS(j, columns) {
            Pack<T> a = load(from, j);
            const Pack<T> g = load(gain, j), b = load(bias, j);
            EACH(k) {
                const W scaled = norm_unit(wide(a.values[k]), mean, rstd) * wide(g.values[k]);
                a.values[k] = narrow(centred ? scaled + wide(b.values[k]) : scaled);
            }
            store(y + row * columns * WIDTH, j, a);
        }
        if (threadIdx.x % 32 == 0) {
            rstds[row] = rstd;
            if (centred) means[row] = mean;
        }
    }
}
"""

NORM_GRADIENT = """
KERNEL layer_norm_dx(const T* dy, const T* x, const T* gain, const W* means, const W* rstds, T* dx, long long rows,
                     long long columns, long long centred) {
    const W width = W(columns * WIDTH);
    ROWS(row, rows) {
        const T *upper = dy + row * columns * WIDTH, *from = x + row * columns * WIDTH;
        const W mean = centred ? means[row] : W(0), rstd = rstds[row];
        W sum = 0, product = 0;
        PACKS(j, columns) {
            const Pack<T> a = load(upper, j), b = load(from, j), g = load(gain, j);
            EACH(k) {
                const W inner = wide(a.values[k]) * wide(g.values[k]);
                sum += inner;
                product += inner * norm_unit(wide(b.values[k]), mean, rstd);
            }
        }
        sum = centred ? warp_sum(sum) / width : W(0);
        product = warp_sum(product) / width;
        PACKS(j, columns) {
            Pack<T> a = load(upper, j);
            const Pack<T> b = load(from, j), g = load(gain, j);
            EACH(k) {
                const W unit = norm_unit(wide(b.values[k]), mean, rstd), inner = wide(a.values[k]) * wide(g.values[k]);
                a.values[k] = narrow(norm_gradient(inner, unit, sum, product, rstd));
            }
            store(dx + row * columns * WIDTH, j, a);
        }
    }
}
"""

SOFTMAX = """
// Row i of each matrix of `queries` rows sees the first + i + 1 keys to the left; `columns` are the packs of a row.
KERNEL causal_probabilities(const W* scores, T* p, long long rows, long long columns, long long queries,
                            long long first, double scale) {
    ROWS(row, rows) {
        const W* from = scores + row * columns * WIDTH;
        const long long visible = first + row % queries + 1, packs = (visible + WIDTH - 1) / WIDTH;
        W top = from[0] * (W)scale, total = 0;
        PACKS(j, packs) {
            const Pack<W> a = load(from, j);
            EACH(k) {
                const W x = a.values[k] * (W)scale;
                top = j * WIDTH + k < visible && x > top ? x : top;
            }
        }
        top = warp_max(top);
        PACKS(j, packs) {
            const Pack<W> a = load(from, j);
            EACH(k) total += j * WIDTH + k < visible ? softmax_term(a.values[k], (W)scale, top) : W(0);
        }
        total = warp_sum(total);
        PACKS(j, columns) {
            Pack<T> b;
            if (j < packs) {
                const Pack<W> a = load(from, j);
                EACH(k) b.values[k] =
                    narrow((j * WIDTH + k < visible ? softmax_term(a.values[k], (W)scale, top) : W(0)) / total);
            } else EACH(k) b.values[k] = narrow(W(0) / total);
            store(p + row * columns * WIDTH, j, b);
        }
    }
}
"""

SOFTMAX_GRADIENT = """
KERNEL causal_gradient(const W* dp, const T* p, T* ds, long long rows, long long columns, long long queries,
                       long long first, double scale) {
    ROWS(row, rows) {
        const W* upper = dp + row * columns * WIDTH;
        const T* from = p + row * columns * WIDTH;
        const long long visible = first + row % queries + 1, packs = (visible + WIDTH - 1) / WIDTH;
        W sum = 0;
        PACKS(j, packs) {
            const Pack<W> a = load(upper, j);
            const Pack<T> b = load(from, j);
            EACH(k) sum += j * WIDTH + k < visible ? a.values[k] * wide(b.values[k]) : W(0);
        }
        sum = warp_sum(sum);
        PACKS(j, columns) {
            Pack<T> c;
            EACH(k) c.values[k] = narrow(W(0));
            if (j < packs) {
                const Pack<W> a = load(upper, j);
                const Pack<T> b = load(from, j);
                EACH(k) if (j * WIDTH + k < visible)
                    c.values[k] = narrow(softmax_gradient(a.values[k], wide(b.values[k]), sum, (W)scale));
            }
            store(ds + row * columns * WIDTH, j, c);
        }
    }
}
"""

CROSS_ENTROPY = """
KERNEL cross_entropy(const T* scores, const long long* targets, W* losses, W* log_sums, long long rows,
                     long long columns) {
    ROWS(row, rows) {
        const T* from = scores + row * columns * WIDTH;
        W top = wide(from[0]), total = 0;
        PACKS(j, columns) {
            const Pack<T> a = load(from, j);
            EACH(k) top = wide(a.values[k]) > top ? wide(a.values[k]) : top;
        }
        top = warp_max(top);
        PACKS(j, columns) {
            const Pack<T> a = load(from, j);
            EACH(k) total += softmax_term(wide(a.values[k]), W(1), top);
        }
        const W log_sum = log_sum_of(warp_sum(total), top);
        if (threadIdx.x % 32 == 0) {
            const long long target = targets[row];
            log_sums[row] = log_sum;  // a target that is no class is refused when the step's numbers are read
            losses[row] = target < 0 ? W(0) : log_sum - wide(from[target % (columns * WIDTH)]);
        }
    }
}
"""

CROSS_ENTROPY_GRADIENT = """
KERNEL cross_entropy_gradient(const T* scores, const long long* targets, const W* log_sums, T* gradient,
                              long long rows, long long columns, double scale) {
    ROWS(row, rows) {
        const long long target = targets[row];
        const W factor = target < 0 ? W(0) : (W)scale, log_sum = log_sums[row];
        PACKS(j, columns) {
            Pack<T> a = load(scores + row * columns * WIDTH, j);
            EACH(k) {
                const W one = j * WIDTH + k == target ? W(1) : W(0);
                a.values[k] = narrow(cross_entropy_slope(wide(a.values[k]), log_sum, one, factor));
            }
            store(gradient + row * columns * WIDTH, j, a);
        }
    }
}
"""

KERNELS = tuple(
    WARPS + text for text in (NORM, NORM_GRADIENT, SOFTMAX, SOFTMAX_GRADIENT, CROSS_ENTROPY, CROSS_ENTROPY_GRADIENT)
)
