/* Reductions: out = left op right on dense memory, where out may be left or right.
 *
 * The bits are those of runtime/ops.py and depend on the operands alone. Of equal numbers maximum and minimum take the
 * right one (zeros differ in their sign). Every NaN is the same one. Integers wrap around. Every function is compiled for several sets of vector
 * instructions, of which the loader takes the best. */
#include <math.h>
#include <string.h>

#include "program.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORISED
#endif

#define LOOP(NAME, TYPE, EXPRESSION)                                                        \
    VECTORISED static void NAME(const char *left, const char *right, char *out, int64_t nbytes) { \
        const TYPE *as = (const TYPE *)left, *bs = (const TYPE *)right;                     \
        TYPE *outs = (TYPE *)out;                                                           \
        for (int64_t i = 0, n = nbytes / (int64_t)sizeof(TYPE); i < n; i++) {               \
            TYPE a = as[i], b = bs[i];                                                      \
            outs[i] = (TYPE)(EXPRESSION);                                                   \
        }                                                                                   \
    }

/* Sums, products and bits of integers depend on their width only; unsigned ones wrap around by definition. */
#define ON_BITS(BITS)                                 \
    LOOP(sum_##BITS, uint##BITS##_t, a + b)           \
    LOOP(and_##BITS, uint##BITS##_t, a & b)           \
    LOOP(or_##BITS, uint##BITS##_t, a | b)            \
    LOOP(xor_##BITS, uint##BITS##_t, a ^ b)           \
    LOOP(land_##BITS, uint##BITS##_t, (a != 0) & (b != 0)) \
    LOOP(lor_##BITS, uint##BITS##_t, (a != 0) | (b != 0))  \
    LOOP(lxor_##BITS, uint##BITS##_t, (a != 0) ^ (b != 0)) \
    LOOP(max_i##BITS, int##BITS##_t, a > b ? a : b)   \
    LOOP(min_i##BITS, int##BITS##_t, a < b ? a : b)   \
    LOOP(max_u##BITS, uint##BITS##_t, a > b ? a : b)  \
    LOOP(min_u##BITS, uint##BITS##_t, a < b ? a : b)

ON_BITS(8)
ON_BITS(16)
ON_BITS(32)
ON_BITS(64)
LOOP(prod_8, uint8_t, a * b)
LOOP(prod_16, uint16_t, (uint32_t)a * b) /* int, to which both are promoted, could overflow */
LOOP(prod_32, uint32_t, a * b)
LOOP(prod_64, uint64_t, a * b)

/* Products of complex numbers are not compiled for instructions that fuse operations: GCC 12 then uses these in spite of
 * -ffp-contract=off. */
#define ON_FLOATS(NAME, TYPE)                                 \
    LOOP(sum_##NAME, TYPE, a + b == a + b ? a + b : (TYPE)NAN)               \
    LOOP(prod_##NAME, TYPE, a * b == a * b ? a * b : (TYPE)NAN)              \
    LOOP(max_##NAME, TYPE, a != a || b != b ? (TYPE)NAN : a > b ? a : b)     \
    LOOP(min_##NAME, TYPE, a != a || b != b ? (TYPE)NAN : a < b ? a : b)     \
    static void complex_prod_##NAME(const char *left, const char *right, char *out, int64_t nbytes) { \
        const TYPE *as = (const TYPE *)left, *bs = (const TYPE *)right;      \
        TYPE *outs = (TYPE *)out;                                            \
        for (int64_t i = 0, n = nbytes / (int64_t)sizeof(TYPE); i < n; i += 2) {   \
            TYPE real = as[i] * bs[i] - as[i + 1] * bs[i + 1];               \
            TYPE imaginary = as[i] * bs[i + 1] + as[i + 1] * bs[i];          \
            outs[i] = real == real ? real : (TYPE)NAN;                       \
            outs[i + 1] = imaginary == imaginary ? imaginary : (TYPE)NAN;    \
        }                                                                    \
    }

ON_FLOATS(f32, float)
ON_FLOATS(f64, double)

typedef struct {
    const char *operation;  /* name of NumPy's function */
    char kind;              /* of a dtype: i, u, f, c, or b for bool */
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

static const Entry ENTRIES[] = {
    INTEGERS(8), INTEGERS(16), INTEGERS(32), INTEGERS(64),
    {"add", 'f', 4, sum_f32}, {"multiply", 'f', 4, prod_f32}, {"maximum", 'f', 4, max_f32}, {"minimum", 'f', 4, min_f32},
    {"add", 'f', 8, sum_f64}, {"multiply", 'f', 8, prod_f64}, {"maximum", 'f', 8, max_f64}, {"minimum", 'f', 8, min_f64},
    {"add", 'c', 8, sum_f32}, {"add", 'c', 16, sum_f64}, /* real and imaginary parts one by one */
    {"multiply", 'c', 8, complex_prod_f32}, {"multiply", 'c', 16, complex_prod_f64},
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
