"""CUDA source of the operators' kernels on a GPU, for one storage type and number of elements per access.

Values are stored as T and computed with as W, as `reference_kernels` does: float64 for float64, else float32. Sums have
an order that depends on shapes only, so results are reproducible. A kernel reads and writes `WIDTH` neighbouring
elements at once, a pack, of at most 16 bytes of T.
"""

from functools import cache

from parallel.nn.kernels.reference_elementwise import FORMULAS
from parallel.nn.kernels.storage import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from quant.kernels import headers

THREADS = 256
CHUNK = 128
"""Rows of a partial sum of columns."""

HALF = """
#ifdef __CUDACC_RTC__
__device__ inline float wide(T x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ inline T narrow(float y) { T x; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(y)); return x; }
#else
inline float wide(T x) { _Float16 y; __builtin_memcpy(&y, &x, 2); return (float)y; }
inline T narrow(float y) { _Float16 z = (_Float16)y; T x; __builtin_memcpy(&x, &z, 2); return x; }
#endif
"""

BFLOAT = """
__device__ inline float wide(T x) {
    union { unsigned int bits; float value; } y;
    y.bits = (unsigned int)x.bits << 16;
    return y.value;
}
#ifdef __CUDACC_RTC__
__device__ inline T narrow(float y) { T x; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x.bits) : "f"(y)); return x; }
#else
inline T narrow(float value) {
    union { unsigned int bits; float value; } y;
    y.value = value;
    T x;
    x.bits = value != value ? 0x7FFF : (y.bits + 0x7FFF + ((y.bits >> 16) & 1)) >> 16;
    return x;
}
#endif
"""

WIDE = "__device__ inline T narrow(W x) { return x; }"
STRUCTURE = "struct T { unsigned short bits; };"

TYPES = {
    FLOAT64: f"typedef double T; typedef double W;\n{WIDE}",
    FLOAT32: f"typedef float T; typedef float W;\n{WIDE}",
    FLOAT16: f"{STRUCTURE} typedef float W;\n{HALF}",
    BFLOAT16: f"{STRUCTURE} typedef float W;\n{BFLOAT}",
}
"""Storage type T, compute type W and casts, by dtype."""

COMMON = """
__device__ inline W wide(W x) { return x; }

template <typename E> struct alignas(sizeof(E) * WIDTH < 16 ? sizeof(E) * WIDTH : 16) Pack { E values[WIDTH]; };
template <typename E> __device__ inline Pack<E> load(const E* x, long long pack) { return ((const Pack<E> *)x)[pack]; }
template <typename E> __device__ inline void store(E* x, long long pack, Pack<E> values) {
    ((Pack<E> *)x)[pack] = values;
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, sizeof(W) == 8 ? 2 : 4)
#define EACH(k) _Pragma("unroll") for (int k = 0; k < WIDTH; k++)
#define LOOP(i, n) \\
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < (n); i += (long long)gridDim.x * THREADS)
"""


@cache
def formulas() -> str:
    """CUDA source of formulas for one element, such as GELU: the headers of the kernels in C."""
    own = "INLINE W same(W x) { return x; }\nINLINE W add(W x, W y) { return x + y; }\n"
    return "#define CUDA_SOURCE\n" + headers.text(headers.PORTABLE, FORMULAS) + own


UNARY = """
KERNEL {name}_of(const T* x, T* y, long long packs) {{
    LOOP(i, packs) {{
        Pack<T> a = load(x, i);
        EACH(k) a.values[k] = narrow({name}(wide(a.values[k])));
        store(y, i, a);
    }}
}}
"""

BINARY = """
KERNEL {name}_of(const T* x, const T* y, T* z, long long packs) {{
    LOOP(i, packs) {{
        Pack<T> a = load(x, i), b = load(y, i);
        EACH(k) a.values[k] = narrow({name}(wide(a.values[k]), wide(b.values[k])));
        store(z, i, a);
    }}
}}
"""

BIASED = """
// z += bias, and y = f(z), which may be written to z; `columns` are the packs of a row.
KERNEL biased_{name}(T* z, const T* bias, T* y, long long packs, long long columns) {{
    LOOP(i, packs) {{
        Pack<T> a = load((const T *)z, i), b = load(bias, (unsigned int)i % (unsigned int)columns);
        EACH(k) a.values[k] = narrow(wide(a.values[k]) + wide(b.values[k]));
        if (y != z) store(z, i, a);
        EACH(k) a.values[k] = narrow({name}(wide(a.values[k])));
        store(y, i, a);
    }}
}}
"""

MASKED = """
KERNEL masked_of(const T* x, const bool* keep, T* y, long long packs, double scale) {
    LOOP(i, packs) {
        Pack<T> a = load(x, i);
        const Pack<bool> b = load(keep, i);
        EACH(k) a.values[k] = narrow(dropout(wide(a.values[k]), b.values[k], (W)scale));
        store(y, i, a);
    }
}
"""


COLUMNS = """
// Sums over the rows of a chunk: blocks of 32 packs of columns and THREADS / 32 rows at a time, then over these rows.
// `sums` has a row for each chunk, of the columns of all parts, side by side.
#define DOWN (THREADS / 32)
__device__ inline void add_columns(const W (&sum)[WIDTH], int part, int parts, W* sums, long long columns) {
    __shared__ W partial[DOWN][32 * WIDTH];
    const int across = threadIdx.x % 32, down = threadIdx.x / 32;
    __syncthreads();  // after the part before
    EACH(k) partial[down][k * 32 + across] = sum[k];
    __syncthreads();
    for (int c = threadIdx.x; c < 32 * WIDTH; c += THREADS) {
        W total = partial[0][c];
        for (int other = 1; other < DOWN; other++) total += partial[other][c];
        const long long column = ((long long)blockIdx.x * 32 + c % 32) * WIDTH + c / 32;
        if (column < columns) sums[((long long)blockIdx.y * parts + part) * columns + column] = total;
    }
}
#define DOWN_ROWS(row, n) \\
    _Pragma("unroll (sizeof(W) == 8 ? 2 : 4)") for (long long row = (long long)blockIdx.y * CHUNK + threadIdx.x / 32; \\
        row < ((long long)(blockIdx.y + 1) * CHUNK < (n) ? (long long)(blockIdx.y + 1) * CHUNK : (n)); row += DOWN)
"""

COLUMN_SUMS = """
KERNEL column_sums(const T* x, W* sums, long long rows, long long columns) {
    const long long pack = (long long)blockIdx.x * 32 + threadIdx.x % 32, packs = columns / WIDTH;
    W sum[WIDTH] = {};
    if (pack < packs)
        DOWN_ROWS(row, rows) {
            const Pack<T> a = load(x, row * packs + pack);
            EACH(k) sum[k] += wide(a.values[k]);
        }
    add_columns(sum, 0, 1, sums, columns);
}
"""

NORM_SUMS = """
KERNEL norm_sums(const T* dy, const T* x, const W* means, const W* rstds, W* sums, long long rows, long long columns,
                 long long centred) {
    const long long pack = (long long)blockIdx.x * 32 + threadIdx.x % 32, packs = columns / WIDTH;
    W products[WIDTH] = {}, sum[WIDTH] = {};
    if (pack < packs)
        DOWN_ROWS(row, rows) {
            const Pack<T> a = load(dy, row * packs + pack), b = load(x, row * packs + pack);
            const W mean = centred ? means[row] : W(0), rstd = rstds[row];
            EACH(k) {
                products[k] += wide(a.values[k]) * norm_unit(wide(b.values[k]), mean, rstd);
                sum[k] += wide(a.values[k]);
            }
        }
    add_columns(products, 0, centred ? 2 : 1, sums, columns);
    if (centred) add_columns(sum, 1, 2, sums, columns);
}
"""

HEADS = """
// Packs of (parts, batch, heads, length, columns) from (batch, length, parts, heads, columns).
KERNEL split_heads(const T* x, T* y, long long packs, long long parts, long long batch, long long length,
                   long long heads, long long columns) {
    LOOP(i, packs) {
        unsigned int rest = (unsigned int)i;
        const unsigned int column = rest % (unsigned int)columns; rest /= (unsigned int)columns;
        const unsigned int position = rest % (unsigned int)length; rest /= (unsigned int)length;
        const unsigned int head = rest % (unsigned int)heads; rest /= (unsigned int)heads;
        const unsigned int sample = rest % (unsigned int)batch, part = rest / (unsigned int)batch;
        store(y, i, load(x, (((sample * length + position) * parts + part) * heads + head) * columns + column));
    }
}
"""

MERGED_HEADS = """
// Packs of (batch, length, parts, heads, columns) from (parts, batch, heads, length, columns), rounded from {kind}.
KERNEL merge_heads(const {kind}* y, T* x, long long packs, long long parts, long long batch, long long length,
                   long long heads, long long columns) {{
    LOOP(i, packs) {{
        unsigned int rest = (unsigned int)i;
        const unsigned int column = rest % (unsigned int)columns; rest /= (unsigned int)columns;
        const unsigned int head = rest % (unsigned int)heads; rest /= (unsigned int)heads;
        const unsigned int part = rest % (unsigned int)parts; rest /= (unsigned int)parts;
        const unsigned int position = rest % (unsigned int)length, sample = rest / (unsigned int)length;
        const auto a = load(y, (((part * batch + sample) * heads + head) * length + position) * columns + column);
        Pack<T> b;
        EACH(k) b.values[k] = narrow(wide(a.values[k]));
        store(x, i, b);
    }}
}}
"""
