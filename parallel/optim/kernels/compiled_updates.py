"""Optimizer updates of `reference_updates` in one pass over memory, compiled by numba for host arrays.

Operation by operation, and with every rounding, as the reference has it: nothing is reordered or fused, so the bits are
the same. The numbers are joined in float64 and rounded once to the vectors' type. `spare` is not needed.
"""
# What numba makes of these functions has other types than Python sees.

from __future__ import annotations

import math

import numpy as np

from quant.kernels.jit import compiler

loop = compiler(error_model="numpy")


@loop
def sgd(weights, gradient, spare, scale, rate, decay):
    """See `reference_updates.sgd`."""
    real = weights.dtype.type
    scale, rate, decay_ = real(scale), real(rate), real(decay)
    if decay == 0:
        for i in range(weights.size):
            weights[i] -= rate * (scale * gradient[i])
    else:
        for i in range(weights.size):
            weights[i] -= rate * (scale * gradient[i] + decay_ * weights[i])


@loop
def momentum(weights, gradient, velocity, spare, scale, rate, beta, nesterov, decay):
    """See `reference_updates.momentum`."""
    real = weights.dtype.type
    scale, rate, beta, decay_ = real(scale), real(rate), real(beta), real(decay)
    if nesterov:
        for i in range(weights.size):
            g = scale * gradient[i]
            if decay != 0:
                g += decay_ * weights[i]
            u = beta * velocity[i] + g
            velocity[i] = u
            weights[i] -= rate * (g + beta * u)
    else:
        for i in range(weights.size):
            g = scale * gradient[i]
            if decay != 0:
                g += decay_ * weights[i]
            u = beta * velocity[i] + g
            velocity[i] = u
            weights[i] -= rate * u


@loop
def _adam(weights, gradient, m, v, scale, rate, beta1, beta2, eps, coupled, keep, correction1, correction2):
    """Body of adam and adamw: `coupled` decay is added to the gradient; weights are multiplied with `keep`, maybe 1."""
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
def adam(weights, gradient, m, v, spare, scale, rate, beta1, beta2, eps, decay, correction1, correction2):
    """See `reference_updates.adam`."""
    _adam(weights, gradient, m, v, scale, rate, beta1, beta2, eps, decay, 1.0, correction1, correction2)


@loop
def adamw(weights, gradient, m, v, spare, scale, rate, beta1, beta2, eps, decay, correction1, correction2):
    """See `reference_updates.adamw`."""
    keep = 1.0 - rate * decay
    _adam(weights, gradient, m, v, scale, rate, beta1, beta2, eps, 0.0, keep, correction1, correction2)


@loop
def lamb_moments(gradient, m, v, spare, scale, beta1, beta2):
    """See `reference_updates.lamb_moments`."""
    real = m.dtype.type
    scale, gain1, gain2 = real(scale), real(1.0 - beta1), real(1.0 - beta2)
    for i in range(m.size):
        g = scale * gradient[i]
        m[i] += gain1 * (g - m[i])
        v[i] += gain2 * (g * g - v[i])


@loop
def lamb_direction(weights, m, v, spare, eps, decay, correction1, correction2):
    """See `reference_updates.lamb_direction`."""
    real = weights.dtype.type
    heal, root, eps, decay_ = real(1.0 / correction1), real(1.0 / math.sqrt(correction2)), real(eps), real(decay)
    u = spare[0, : weights.size]
    for i in range(weights.size):
        u[i] = heal * (m[i] / (root * np.sqrt(v[i]) + eps))
    if decay != 0:
        for i in range(weights.size):
            u[i] += decay_ * weights[i]
    return u


@loop
def lamb(weights, m, v, spare, rate, eps, decay, correction1, correction2):
    """See `reference_updates.lamb`."""
    real = weights.dtype.type
    rate = real(rate)
    u = lamb_direction(weights, m, v, spare, eps, decay, correction1, correction2)
    for i in range(weights.size):
        weights[i] -= rate * u[i]


@loop
def squares(x, block, spare, out):
    """See `reference_updates.squares`."""
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
