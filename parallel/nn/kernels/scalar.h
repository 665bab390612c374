/* Scalar functions of float32 without branches, so that loops over them vectorise. NaN stays NaN.
 *
 * Products and sums may be fused. */
#ifndef CHORUS_SCALAR_H
#define CHORUS_SCALAR_H

#include "portable.h"

#define LOWEST -87.0f          /* exp of less is 0: almost the smallest normal number, 1.2e-38 */
#define SHIFT 12582912.0f      /* 1.5 * 2^23: once added, the last digit of a float32 is that of an integer */
#define TWICE_SLOPE 1.5957691216057308f /* 2 sqrt(2 / pi) */
#define CUBIC 0.044715f
#define FAR 12.0f              /* from this distance on, the slope of GELU's approximation is 0 or 1 */

/* exp(x) for x below 88, accurate to 2 units in the last place; 0 for x below -87.
 *
 * exp(n ln 2 + r) = 2^n exp(r): method and coefficients of expf in the Cephes library (S. Moshier, netlib.org/cephes). */
INLINE float exp_down(float x) {
    const float bounded = x < LOWEST ? LOWEST : x;
    const float shifted = bounded * 1.44269504088896341f + SHIFT, n = shifted - SHIFT;
    float r = bounded - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const float power = float_of((int32_t)((uint32_t)(bits_of(shifted) + 127) << 23));
    return x < LOWEST ? 0.0f : p * power;
}

/* 1 / (1 + exp(-x)), computed from exp(-|x|), which cannot overflow. */
INLINE float logistic(float x) {
    const float e = exp_down(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* Density of the normal distribution at x; the distribution function goes to `below`.
 *
 * erfc(z) = exp(-z^2) t P(t) with t = 1 / (1 + 0.42 z) and z = |x| / sqrt 2: the form of formula 7.1.26 of Abramowitz and
 * Stegun, "Handbook of Mathematical Functions" (1964), with eight coefficients, a minimax fit for z up to 9.4 (beyond, erfc
 * is 0 in float32): relative error 1.7e-7. */
INLINE float normal(float x, float *below) {
    const float z = fabsf(x) * 0.70710678118654752f, e = exp_down(-(z * z)), t = 1.0f / (1.0f + 0.42f * z);
    float p = 0.07039331645f * t + -0.3209409416f;
    p = p * t + 0.4418688715f;
    p = p * t + -0.1316446215f;
    p = p * t + 0.2693445683f;
    p = p * t + 0.1945401877f;
    p = p * t + 0.2396162599f;
    p = p * t + 0.2368222028f;
    const float tail = 0.5f * e * (p * t);
    *below = x < 0.0f ? tail : 1.0f - tail;
    return e * 0.39894228040143268f;
}

INLINE float relu(float x) { return x < 0.0f ? 0.0f : x; /* NaN stays NaN */ }
INLINE float relu_backward(float dy, float y) { return dy * (y > 0.0f ? 1.0f : 0.0f); }

INLINE float gelu(float x) {
    float below;
    normal(x, &below);
    return x * below;
}

INLINE float gelu_backward(float dy, float x) {
    float below;
    const float density = normal(x, &below);
    return dy * (below + x * density);
}

/* (1 + tanh(u)) / 2 = logistic(2 u) */
INLINE float gelu_tanh(float x) { return x * logistic(TWICE_SLOPE * x * (1.0f + CUBIC * x * x)); }

INLINE float gelu_tanh_backward(float dy, float x) {
    const float near = x > FAR ? FAR : (x < -FAR ? -FAR : x), square = near * near;
    const float s = logistic(TWICE_SLOPE * near * (1.0f + CUBIC * square));
    return dy * (s + near * s * (1.0f - s) * TWICE_SLOPE * (1.0f + 3.0f * CUBIC * square));
}

INLINE float silu(float x) { return x * logistic(x); }

INLINE float silu_backward(float dy, float x) {
    const float s = logistic(x);
    return dy * s * (1.0f + x * (1.0f - s));
}

#endif
