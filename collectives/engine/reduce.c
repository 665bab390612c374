/* Reductions: out = left op right on dense memory of any alignment, where out may be left or right.
 *
 * The bits are those of arguments/ops.py and depend on the operands alone. Of equal numbers maximum and minimum take the
 * right one, or the left one of float16 and long double (zeros differ in their sign). Every NaN is the same one. Integers
 * wrap around. Most functions are compiled for several sets of vector instructions, of which the loader takes the best. */
#include <math.h>
#include <string.h>

#include "program.h"

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#if __GNUC__ >= 12
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#define UNFUSED __attribute__((target_clones("avx2", "default"))) /* without instructions that fuse operations */
#else
#define VECTORISED
#define UNFUSED
#endif

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)") /* out is an operand, or apart from both */
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define UNALIGNED(TYPE, NAME) typedef TYPE __attribute__((aligned(1), may_alias)) NAME

#define LOOP(CLONES, NAME, TYPE, EXPRESSION)                                                    \
    CLONES static void NAME(const char *left, const char *right, char *out, int64_t nbytes) {   \
        UNALIGNED(TYPE, Element);                                                               \
        const Element *as = (const Element *)left, *bs = (const Element *)right;                \
        Element *outs = (Element *)out;                                                         \
        INDEPENDENT                                                                             \
        for (int64_t i = 0, n = nbytes / (int64_t)sizeof(TYPE); i < n; i++) {                   \
            TYPE a = as[i], b = bs[i];                                                          \
            outs[i] = EXPRESSION;                                                               \
        }                                                                                       \
    }

/* Sums, products and bits of integers depend on their width only; unsigned ones wrap around by definition. Of the
 * products, int, to which narrow ones are promoted, could overflow. */
#define ON_BITS(BITS)                                              \
    LOOP(VECTORISED, sum_##BITS, uint##BITS##_t, a + b)            \
    LOOP(VECTORISED, prod_##BITS, uint##BITS##_t, 1u * a * b)      \
    LOOP(VECTORISED, and_##BITS, uint##BITS##_t, a & b)            \
    LOOP(VECTORISED, or_##BITS, uint##BITS##_t, a | b)             \
    LOOP(VECTORISED, xor_##BITS, uint##BITS##_t, a ^ b)            \
    LOOP(VECTORISED, land_##BITS, uint##BITS##_t, (a != 0) & (b != 0)) \
    LOOP(VECTORISED, lor_##BITS, uint##BITS##_t, (a != 0) | (b != 0))  \
    LOOP(VECTORISED, lxor_##BITS, uint##BITS##_t, (a != 0) ^ (b != 0)) \
    LOOP(VECTORISED, max_i##BITS, int##BITS##_t, a > b ? a : b)    \
    LOOP(VECTORISED, min_i##BITS, int##BITS##_t, a < b ? a : b)    \
    LOOP(VECTORISED, max_u##BITS, uint##BITS##_t, a > b ? a : b)   \
    LOOP(VECTORISED, min_u##BITS, uint##BITS##_t, a < b ? a : b)

ON_BITS(8)
ON_BITS(16)
ON_BITS(32)
ON_BITS(64)

/* Products of complex numbers are not compiled for instructions that fuse operations: GCC 12 then uses these in spite of
 * -ffp-contract=off. */
#define ON_FLOATS(NAME, TYPE, MORE, LESS, CLONES, UNFUSED_CLONES)                   \
    static inline TYPE or_nan_##NAME(bool is_nan, TYPE x) { return is_nan ? (TYPE)NAN : x; } \
    LOOP(CLONES, sum_##NAME, TYPE, a + b == a + b ? a + b : (TYPE)NAN)              \
    LOOP(CLONES, prod_##NAME, TYPE, a * b == a * b ? a * b : (TYPE)NAN)             \
    LOOP(CLONES, max_##NAME, TYPE, or_nan_##NAME((a != a) | (b != b), a MORE b ? a : b)) \
    LOOP(CLONES, min_##NAME, TYPE, or_nan_##NAME((a != a) | (b != b), a LESS b ? a : b)) \
    UNFUSED_CLONES static void complex_prod_##NAME(const char *left, const char *right, char *out, int64_t nbytes) { \
        UNALIGNED(TYPE, Element);                                            \
        const Element *as = (const Element *)left, *bs = (const Element *)right;   \
        Element *outs = (Element *)out;                                      \
        INDEPENDENT                                                          \
        for (int64_t i = 0, n = nbytes / (int64_t)sizeof(TYPE); i < n; i += 2) {   \
            TYPE real = as[i] * bs[i] - as[i + 1] * bs[i + 1];               \
            TYPE imaginary = as[i] * bs[i + 1] + as[i + 1] * bs[i];          \
            outs[i] = real == real ? real : (TYPE)NAN;                       \
            outs[i + 1] = imaginary == imaginary ? imaginary : (TYPE)NAN;    \
        }                                                                    \
    }

ON_FLOATS(f32, float, >, <, VECTORISED, UNFUSED)
ON_FLOATS(f64, double, >, <, VECTORISED, UNFUSED)
ON_FLOATS(long, long double, >=, <=, , )

/* ------------------------------------------------------------------------------------------ numbers of 16 bits
 *
 * Blocks become float32 and are rounded after the operation, to the nearest or even number. */

enum { BLOCK = 512 };

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Without numbers below the normal ones, which a process may have set to be taken as zeros. */
static inline float from_f16(uint16_t half) {
    uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t normal = (magnitude << 13) + (magnitude < 0x7c00 ? 112u << 23 : 224u << 23);
    uint32_t tiny = bits_of(float_of(magnitude | 126u << 23) - 0.5f);
    return float_of((magnitude < 0x400 ? tiny : normal) | sign);
}

/* The sum with a power of two, the exponent of x plus 13, rounds x: its last bits are those of the result. */
static inline uint16_t to_f16(float x) {
    uint32_t twice = bits_of(x) << 1, exponent = twice & 0xff000000u;
    float rounded = float_of(bits_of(x) & 0x7fffffffu) * 0x1p+112f * 0x1p-110f;
    rounded += float_of(((exponent > 0x71000000u ? exponent : 0x71000000u) >> 1) + 0x07800000u);
    uint32_t magnitude = (bits_of(rounded) >> 13 & 0x7c00u) + (bits_of(rounded) & 0xfffu);
    return (uint16_t)((bits_of(x) >> 31 << 15) | (twice > 0xff000000u ? 0x7e00u : magnitude));
}

static inline float from_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }

static inline uint16_t to_bf16(float x) {
    uint32_t bits = bits_of(x), rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(x == x ? rounded : 0x7fc0u);
}

UNALIGNED(uint16_t, Half);

#define CONVERSIONS(FORMAT)                                                          \
    VECTORISED static void widen_##FORMAT(const char *from, float *to, int64_t count) {   \
        for (int64_t i = 0; i < count; i++) to[i] = from_##FORMAT(((const Half *)from)[i]); \
    }                                                                                \
    VECTORISED static void narrow_##FORMAT(const float *from, char *to, int64_t count) {  \
        for (int64_t i = 0; i < count; i++) ((Half *)to)[i] = to_##FORMAT(from[i]);  \
    }

CONVERSIONS(f16)
CONVERSIONS(bf16)

#if defined(__x86_64__)
#include <immintrin.h>

/* By instructions of F16C, which all processors with AVX2 have. */
__attribute__((target("avx2,f16c"))) static void widen_by_f16c(const char *from, float *to, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * i))));
    widen_f16(from + 2 * i, to + i, count - i);
}

__attribute__((target("avx2,f16c"))) static void narrow_by_f16c(const float *from, char *to, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(to + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    narrow_f16(from + i, to + 2 * i, count - i);
}

#define BEST_F16(CONVERT) (__builtin_cpu_supports("avx2") ? CONVERT##_by_f16c : CONVERT##_f16)
#else
#define BEST_F16(CONVERT) CONVERT##_f16
#endif
#define BEST_BF16(CONVERT) CONVERT##_bf16

#define IN_BLOCKS(NAME, REDUCE, LEFT, RIGHT, BEST)                                           \
    static void NAME(const char *left, const char *right, char *out, int64_t nbytes) {       \
        float as[BLOCK], bs[BLOCK];                                                          \
        for (int64_t start = 0, count; start < nbytes; start += 2 * count) {                 \
            count = (nbytes - start) / 2 < BLOCK ? (nbytes - start) / 2 : BLOCK;             \
            BEST(widen)(left + start, as, count);                                            \
            BEST(widen)(right + start, bs, count);                                           \
            REDUCE((const char *)LEFT, (const char *)RIGHT, (char *)as, 4 * count);          \
            BEST(narrow)(as, out + start, count);                                            \
        }                                                                                    \
    }

#define ON_HALVES(FORMAT, LEFT, RIGHT, BEST)               \
    IN_BLOCKS(sum_##FORMAT, sum_f32, as, bs, BEST)         \
    IN_BLOCKS(prod_##FORMAT, prod_f32, as, bs, BEST)       \
    IN_BLOCKS(max_##FORMAT, max_f32, LEFT, RIGHT, BEST)    \
    IN_BLOCKS(min_##FORMAT, min_f32, LEFT, RIGHT, BEST)

ON_HALVES(f16, bs, as, BEST_F16)
ON_HALVES(bf16, as, bs, BEST_BF16)

/* ------------------------------------------------------------------------------------------ table */

typedef struct {
    const char *operation;  /* name of NumPy's function */
    char kind;              /* of a dtype: i, u, f, c, b for bool, or V for bfloat16 */
    int itemsize;
    Reduction *reduce;
} Entry;

#define INTEGERS(BITS)                                                                                           \
    {"add", 'i', BITS / 8, sum_##BITS}, {"add", 'u', BITS / 8, sum_##BITS},                                      \
    {"multiply", 'i', BITS / 8, prod_##BITS}, {"multiply", 'u', BITS / 8, prod_##BITS},                          \
    {"maximum", 'i', BITS / 8, max_i##BITS}, {"maximum", 'u', BITS / 8, max_u##BITS},                            \
    {"minimum", 'i', BITS / 8, min_i##BITS}, {"minimum", 'u', BITS / 8, min_u##BITS},                            \
    {"bitwise_and", 'i', BITS / 8, and_##BITS}, {"bitwise_and", 'u', BITS / 8, and_##BITS},                      \
    {"bitwise_or", 'i', BITS / 8, or_##BITS}, {"bitwise_or", 'u', BITS / 8, or_##BITS},                          \
    {"bitwise_xor", 'i', BITS / 8, xor_##BITS}, {"bitwise_xor", 'u', BITS / 8, xor_##BITS},                      \
    {"logical_and", 'i', BITS / 8, land_##BITS}, {"logical_and", 'u', BITS / 8, land_##BITS},                    \
    {"logical_or", 'i', BITS / 8, lor_##BITS}, {"logical_or", 'u', BITS / 8, lor_##BITS},                        \
    {"logical_xor", 'i', BITS / 8, lxor_##BITS}, {"logical_xor", 'u', BITS / 8, lxor_##BITS}

#define FLOATS(KIND, BYTES, NAME)                                                    \
    {"add", KIND, BYTES, sum_##NAME}, {"multiply", KIND, BYTES, prod_##NAME},        \
    {"maximum", KIND, BYTES, max_##NAME}, {"minimum", KIND, BYTES, min_##NAME}

/* The sum of complex numbers is that of real and imaginary parts one by one. */
#define COMPLEX(BYTES, NAME) {"add", 'c', BYTES, sum_##NAME}, {"multiply", 'c', BYTES, complex_prod_##NAME}

static const Entry ENTRIES[] = {
    INTEGERS(8), INTEGERS(16), INTEGERS(32), INTEGERS(64),
    FLOATS('f', 4, f32), FLOATS('f', 8, f64), FLOATS('f', 2, f16), FLOATS('V', 2, bf16),
    COMPLEX(8, f32), COMPLEX(16, f64),
#if __SIZEOF_LONG_DOUBLE__ == 16
    FLOATS('f', 16, long), COMPLEX(32, long),
#endif
    /* All bytes of bools but 0 are true, and results are 0 or 1. */
    {"add", 'b', 1, lor_8}, {"maximum", 'b', 1, lor_8}, {"logical_or", 'b', 1, lor_8}, {"bitwise_or", 'b', 1, lor_8},
    {"multiply", 'b', 1, land_8}, {"minimum", 'b', 1, land_8}, {"logical_and", 'b', 1, land_8},
    {"bitwise_and", 'b', 1, land_8}, {"logical_xor", 'b', 1, lxor_8}, {"bitwise_xor", 'b', 1, lxor_8},
};

enum { ENTRY_COUNT = sizeof(ENTRIES) / sizeof(ENTRIES[0]) };

Reduction *find_reduction(int number) { return ENTRIES[number].reduce; }

/* Number of a reduction, for rows; -1 if there is none. */
int reduction_number(const char *operation, char kind, int itemsize) {
    for (int number = 0; number < ENTRY_COUNT; number++) {
        const Entry *one = &ENTRIES[number];
        if (one->kind == kind && one->itemsize == itemsize && !strcmp(one->operation, operation)) return number;
    }
    return -1;
}

bool has_reduction(int number) { return number >= 0 && number < ENTRY_COUNT; }
