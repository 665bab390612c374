/* Shared by the files of the module `_operators`. */
#ifndef CHORUS_OPERATORS_H
#define CHORUS_OPERATORS_H

#include <string.h>

#include "kernel.h"
#include "scalar.h"

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)") /* the output may be an operand */
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias)); /* 16 numbers at any address */

INLINE float lanes_sum(Lanes a, Lanes b, Lanes c, Lanes d) {
    const Lanes sum = (a + b) + (c + d);
    float total = 0;
    for (int i = 0; i < 16; i++)
        total += sum[i];
    return total;
}

/* Sum of TERM, an expression of `Lanes`, over the elements j of rows: four sums of 16 numbers each, which do not wait for
 * each other. LOAD(x) is the part of row x at j; REST is the
 * same expression of single numbers, for the end of a row. */
#define LOAD(X) (*(const Lanes *)((X) + j))
#define SUM_OF(TOTAL, COUNT, TERM, REST)                                  \
    do {                                                                  \
        Lanes sum0 = {0}, sum1 = {0}, sum2 = {0}, sum3 = {0};             \
        int64_t j = 0;                                                    \
        for (; j + 64 <= (COUNT); j += 16) {                              \
            sum0 += (TERM), j += 16;                                      \
            sum1 += (TERM), j += 16;                                      \
            sum2 += (TERM), j += 16;                                      \
            sum3 += (TERM);                                               \
        }                                                                 \
        for (; j + 16 <= (COUNT); j += 16)                                \
            sum0 += (TERM);                                               \
        float rest = 0;                                                   \
        for (; j < (COUNT); j++)                                          \
            rest += (REST);                                               \
        (TOTAL) = lanes_sum(sum0, sum1, sum2, sum3) + rest;               \
    } while (0)

#define DO_PRAGMA(TEXT) _Pragma(#TEXT)

/* Functions of the table in operators.c: name, signature. */
#define OPERATORS(OPERATOR)                  \
    OPERATOR(gelu, "fF")                     \
    OPERATOR(gelu_tanh, "fF")                \
    OPERATOR(silu, "fF")                     \
    OPERATOR(relu_backward, "ffF")           \
    OPERATOR(gelu_backward, "ffF")           \
    OPERATOR(gelu_tanh_backward, "ffF")      \
    OPERATOR(silu_backward, "ffF")           \
    OPERATOR(biased_relu, "Ff")              \
    OPERATOR(biased_gelu, "FfF")             \
    OPERATOR(biased_gelu_tanh, "FfF")        \
    OPERATOR(biased_silu, "FfF")             \
    OPERATOR(masked, "fbrF")                 \
    OPERATOR(keep, "liiiiB")                 \
    OPERATOR(sum_rows, "fF")                 \
    OPERATOR(layer_norm, "fff?rFF?F")        \
    OPERATOR(layer_norm_backward, "ffff?fFFF?F") \
    OPERATOR(causal_softmax, "Firi")         \
    OPERATOR(softmax_backward, "Ffr")        \
    OPERATOR(visible_softmax, "FrllF")       \
    OPERATOR(visible_probabilities, "Frllf") \
    OPERATOR(attention_gradient, "Ffrf")     \
    OPERATOR(merge_attention, "FFff")        \
    OPERATOR(softmax_cross_entropy, "flF")   \
    OPERATOR(softmax_cross_entropy_backward, "rflfF") \
    OPERATOR(embedding_gradient, "flF")      \
    OPERATOR(add_rows, "Flff?")              \
    OPERATOR(weighted_rows, "flffFF")        \
    OPERATOR(softmax, "fF")                  \
    OPERATOR(top_k, "fiB")                   \
    OPERATOR(row_products, "flfF")

#define DECLARE(NAME, SIGNATURE) double run_##NAME(const Argument *a);
OPERATORS(DECLARE)

#endif
