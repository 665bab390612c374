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

enum { LANES = 64 /* sums side by side, which do not wait for each other */, FEW = LANES / 4 };

/* Sum of TERM, an expression of j, from j = 0 on. The order of additions depends on COUNT only: element j of whole groups
 * goes to lane j % LANES, of the rest in groups of FEW to lane j % FEW, and the end is added one by one. TERM writes
 * nothing: of a loop that writes, the compiler makes a second one for arrays near each other, with other roundings. */
#define SUM_OF(TOTAL, COUNT, TERM)                                              \
    do {                                                                        \
        float lanes[LANES] = {0}, end = 0;                                      \
        int64_t at = 0;                                                         \
        for (; at + LANES <= (COUNT); at += LANES)                              \
            for (int64_t lane = 0; lane < LANES; lane++) {                      \
                const int64_t j = at + lane;                                    \
                lanes[lane] += (TERM);                                          \
            }                                                                   \
        for (; at + FEW <= (COUNT); at += FEW)                                  \
            for (int64_t lane = 0; lane < FEW; lane++) {                        \
                const int64_t j = at + lane;                                    \
                lanes[lane] += (TERM);                                          \
            }                                                                   \
        for (int64_t j = at; j < (COUNT); j++)                                  \
            end += (TERM);                                                      \
        (TOTAL) = 0;                                                            \
        for (int i = 0; i < FEW; i++)                                           \
            (TOTAL) += (lanes[i] + lanes[i + FEW]) + (lanes[i + 2 * FEW] + lanes[i + 3 * FEW]); \
        (TOTAL) += end;                                                         \
    } while (0)

#define DO_PRAGMA(TEXT) _Pragma(#TEXT)

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Functions of the table in operators.c: name, signature. */
#define OPERATORS(OPERATOR)                  \
    OPERATOR(gelu, "fF")                     \
    OPERATOR(gelu_tanh, "fF")                \
    OPERATOR(silu, "fF")                     \
    OPERATOR(relu_backward, "ffF")           \
    OPERATOR(gelu_backward, "ffF")           \
    OPERATOR(gelu_tanh_backward, "ffF")      \
    OPERATOR(silu_backward, "ffF")           \
    OPERATOR(biased_relu, "FfF")             \
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
