/* Formulas of the operators for one element of type W, without branches, so that loops over them vectorise.
 *
 * In C, W is float, and products and sums may be fused. CUDA sources contain this text after their type W, with
 * CUDA_SOURCE defined. NaN stays NaN. */
#ifndef CHORUS_SCALAR_H
#define CHORUS_SCALAR_H

#include "portable.h"

#define ROOT_HALF ((W)0.70710678118654752)     /* sqrt(1 / 2) */
#define DENSITY_AT_0 ((W)0.39894228040143268)  /* 1 / sqrt(2 pi) */
#define TWICE_SLOPE ((W)1.5957691216057308)    /* 2 sqrt(2 / pi) */
#define CUBIC ((W)0.044715)
#define FAR ((W)16) /* from this distance on, the slope of GELU's approximation is 0 or 1 */

#ifdef CUDA_SOURCE
INLINE W exp_down(W x) { return exp(x); }
INLINE W magnitude(W x) { return fabs(x); }
INLINE W square_root(W x) { return sqrt(x); }
INLINE W logarithm(W x) { return log(x); }

/* Density of the normal distribution at x; the distribution function goes to `below`. */
INLINE W normal(W x, W *below) {
    *below = (W)0.5 * (erf(x * ROOT_HALF) + (W)1);
    return exp(x * x * (W)-0.5) * DENSITY_AT_0;
}
#else
typedef float W;

#define LOWEST -87.0f     /* exp of less is 0: almost the smallest normal number, 1.2e-38 */
#define SHIFT 12582912.0f /* 1.5 * 2^23: once added, the last digit of a float32 is that of an integer */

INLINE float magnitude(float x) { return fabsf(x); }
INLINE float square_root(float x) { return sqrtf(x); }
INLINE float logarithm(float x) { return logf(x); }

/* exp(x) for x below 88, accurate to 2 units in the last place; 0 for x below -87.
 *
 * exp(n ln 2 + r) = 2^n exp(r): method and coefficients of expf in the Cephes library (S. Moshier,
 * netlib.org/cephes). */
INLINE float exp_down(float x) {
    const float shifted = x * 1.44269504088896341f + SHIFT, n = shifted - SHIFT; /* any number if x is below LOWEST */
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r + 1.0f) * r + 1.0f;
    const float power = float_of((int32_t)(((uint32_t)bits_of(shifted) + 127u) << 23));
    return x < LOWEST ? 0.0f : p * power;
}

/* Density of the normal distribution at x; the distribution function goes to `below`.
 *
 * erfc(z) = exp(-z^2) t P(t) with t = 1 / (1 + 0.42 z) and z = |x| / sqrt 2: the form of formula 7.1.26 of Abramowitz
 * and Stegun, "Handbook of Mathematical Functions" (1964), with eight coefficients, a minimax fit for z up to 9.4
 * (beyond, erfc is 0 in float32): relative error 1.7e-7. */
INLINE float normal(float x, float *below) {
    const float z = magnitude(x) * ROOT_HALF, e = exp_down(-(z * z)), t = 1.0f / (1.0f + 0.42f * z);
    float p = 0.07039331645f * t + -0.3209409416f;
    p = p * t + 0.4418688715f;
    p = p * t + -0.1316446215f;
    p = p * t + 0.2693445683f;
    p = p * t + 0.1945401877f;
    p = p * t + 0.2396162599f;
    p = p * t + 0.2368222028f;
    const float tail = 0.5f * e * (p * t);
    *below = x < 0.0f ? tail : 1.0f - tail;
    return e * DENSITY_AT_0;
}
#endif

/* 1 / (1 + exp(-x)), computed from exp(-|x|), which cannot overflow. */
INLINE W logistic(W x) {
    const W e = exp_down(-magnitude(x));
    return (x < 0 ? e : (W)1) / ((W)1 + e);
}

INLINE W relu(W x) { return x < 0 ? (W)0 : x; /* NaN stays NaN */ }
INLINE W relu_backward(W dy, W y) { return dy * (y > 0 ? (W)1 : (W)0); }

INLINE W gelu(W x) {
    W below;
    normal(x, &below);
    return x * below;
}

INLINE W gelu_backward(W dy, W x) {
    W below;
    const W density = normal(x, &below);
    return dy * (below + x * density);
}

/* (1 + tanh(u)) / 2 = logistic(2 u) */
INLINE W gelu_tanh(W x) { return x * logistic(x * (TWICE_SLOPE + TWICE_SLOPE * CUBIC * (x * x))); }

INLINE W gelu_tanh_backward(W dy, W x) {
    const W near = x > FAR ? FAR : (x < -FAR ? -FAR : x), square = near * near;
    const W s = logistic(near * (TWICE_SLOPE + TWICE_SLOPE * CUBIC * square));
    const W slope = near * (TWICE_SLOPE + (W)3 * TWICE_SLOPE * CUBIC * square); /* x d/dx of the argument */
    return dy * (s * ((W)1 + ((W)1 - s) * slope));
}

INLINE W silu(W x) { return x * logistic(x); }

INLINE W silu_backward(W dy, W x) {
    const W s = logistic(x);
    return dy * (s * ((W)1 + x * ((W)1 - s)));
}

INLINE W dropout(W x, bool keep, W scale) { return x * (keep ? (W)1 : (W)0) * scale; }

#define PHILOX_FIRST 0xD2511F53u
#define PHILOX_SECOND 0xCD9E8D57u
#define WEYL_FIRST 0x9E3779B9u
#define WEYL_SECOND 0xBB67AE85u

/* Philox-4x32-10: replace a counter of four words by random numbers (Salmon et al., SC 2011). */
INLINE void philox(uint32_t *words, uint32_t key0, uint32_t key1) {
    UNROLLED for (int round = 0; round < 10; round++) {
        const uint64_t left = (uint64_t)words[0] * PHILOX_FIRST, right = (uint64_t)words[2] * PHILOX_SECOND;
        words[0] = (uint32_t)(right >> 32) ^ words[1] ^ key0;
        words[1] = (uint32_t)right;
        words[2] = (uint32_t)(left >> 32) ^ words[3] ^ key1;
        words[3] = (uint32_t)left;
        key0 += WEYL_FIRST;
        key1 += WEYL_SECOND;
    }
}

/* Norms of rows: inverse deviation from the sum of squares, an element in units of the deviation, and the gradient with
 * respect to it. With `inner` = dy gain, `total` is the mean of `inner` over the row, `along` the mean of `inner` unit. */
INLINE W norm_rstd(W squares, W width, W eps) { return (W)1 / square_root(squares / width + eps); }
INLINE W norm_unit(W x, W mean, W rstd) { return (x - mean) * rstd; }
INLINE W norm_gradient(W inner, W unit, W total, W along, W rstd) { return (inner - total - unit * along) * rstd; }

/* Softmax of `scale` times scores: exponential of a score relative to `top`, logarithm of the sum of exponentials, and the
 * gradient of a score; `along` is the sum of dp p over the row. */
INLINE W softmax_term(W score, W scale, W top) { return exp_down(score * scale - top); }
INLINE W log_sum_of(W total, W top) { return logarithm(total) + top; }
INLINE W softmax_gradient(W dp, W p, W along, W scale) { return (dp - along) * p * scale; }

/* Gradient of `factor` times the cross entropy by a score; `one` is 1 for that of the target, else 0. */
INLINE W cross_entropy_slope(W score, W log_sum, W one, W factor) {
    return (softmax_term(score, (W)1, log_sum) - one) * factor;
}

#endif
