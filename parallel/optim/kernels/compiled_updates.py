"""Optimizer updates as in `reference_updates`, but in one pass over memory, compiled by numba for host arrays.

Operations and roundings are those of the reference, without reordering or fusing: the bits are the same. Only LAMB's
direction and `squares` need `spare`.
"""
# Numba infers other types than Python annotations could express.

import math

import numpy as np

from parallel.optim.kernels.reference_updates import SPARE_TERMS as SPARE_TERMS
from quant.kernels.jit import compiler

loop = compiler(error_model="numpy")


@loop
def sgd(weights, gradient, spare, scalars):
    real = weights.dtype.type
    scale, rate, decay = real(scalars[0]), real(scalars[1]), real(scalars[2])
    for i in range(weights.size):
        g = scale * gradient[i]
        if scalars[2] != 0:
            g += decay * weights[i]
        weights[i] -= rate * g


@loop
def momentum(weights, gradient, velocity, spare, scalars, nesterov):
    real = weights.dtype.type
    scale, rate, decay, beta = real(scalars[0]), real(scalars[1]), real(scalars[2]), real(scalars[3])
    for i in range(weights.size):
        g = scale * gradient[i]
        if scalars[2] != 0:
            g += decay * weights[i]
        u = beta * velocity[i] + g
        velocity[i] = u
        weights[i] -= rate * (g + beta * u if nesterov else u)


@loop
def _adam(weights, gradient, m, v, scalars, coupled, keep):
    """Update of Adam (weight decay `coupled`, added to the gradient) or AdamW (weights first multiplied by `keep`)."""
    scale, rate, _, beta1, beta2, eps, correction1, correction2 = scalars
    real = weights.dtype.type
    gain1, gain2, root = real(1.0 - beta1), real(1.0 - beta2), real(1.0 / math.sqrt(correction2))
    scale, pace, eps, decay, factor = real(scale), real(rate / correction1), real(eps), real(coupled), real(keep)
    for i in range(weights.size):
        g = scale * gradient[i]
        if coupled != 0:
            g += decay * weights[i]
        a = m[i] + gain1 * (g - m[i])
        b = v[i] + gain2 * (g * g - v[i])
        m[i] = a
        v[i] = b
        weights[i] = factor * weights[i] - pace * (a / (root * np.sqrt(b) + eps))


@loop
def adam(weights, gradient, m, v, spare, scalars):
    _adam(weights, gradient, m, v, scalars, scalars[2], 1.0)


@loop
def adamw(weights, gradient, m, v, spare, scalars):
    _adam(weights, gradient, m, v, scalars, 0.0, 1.0 - scalars[1] * scalars[2])


@loop
def lamb_moments(gradient, m, v, spare, scalars):
    scale, _, _, beta1, beta2, _, _, _ = scalars
    real = m.dtype.type
    scale, gain1, gain2 = real(scale), real(1.0 - beta1), real(1.0 - beta2)
    for i in range(m.size):
        g = scale * gradient[i]
        m[i] += gain1 * (g - m[i])
        v[i] += gain2 * (g * g - v[i])


@loop
def lamb_direction(weights, m, v, spare, scalars):
    _, _, decay, _, _, eps, correction1, correction2 = scalars
    real = weights.dtype.type
    heal, root, eps = real(1.0 / correction1), real(1.0 / math.sqrt(correction2)), real(eps)
    u = spare[0, : weights.size]
    for i in range(weights.size):
        u[i] = heal * (m[i] / (root * np.sqrt(v[i]) + eps))
    if decay != 0:
        for i in range(weights.size):
            u[i] += real(decay) * weights[i]
    return u


@loop
def lamb(weights, m, v, spare, scalars):
    rate = weights.dtype.type(scalars[1])
    u = lamb_direction(weights, m, v, spare, scalars)
    for i in range(weights.size):
        weights[i] -= rate * u[i]


@loop
def average(weights, ema, spare, keep, gain):
    real = weights.dtype.type
    keep, gain = real(keep), real(gain)
    for i in range(weights.size):
        ema[i] = keep * ema[i] + gain * weights[i]


@loop
def squares(x, block, spare, out):
    for number in range(out.size):
        width = block // 2
        start = number * block
        for i in range(width):
            left, right = np.float64(x[start + i]), np.float64(x[start + width + i])
            spare[i] = left * left + right * right
        while width > 1:
            width //= 2
            for i in range(width):
                spare[i] += spare[width + i]
        out[number] = spare[0]
