"""What `reference` does, in one pass over the memory: compiled by numba for host arrays.

Operation by operation, and with every rounding, as the reference has it: nothing is reordered or fused, so the bits are
the same. The numbers are joined in float64 and rounded once to the vectors' type. `spare` is not needed.
"""
# What numba makes of these functions has other types than Python sees.

from __future__ import annotations

import math

import numpy as np
from numba import njit


@njit(cache=True, error_model="numpy")
def sgd(weights, gradient, spare, scale, rate, decay):
    """See `reference.sgd`."""
    real = weights.dtype.type
    scale, rate, decay_ = real(scale), real(rate), real(decay)
    if decay == 0:
        for i in range(weights.size):
            weights[i] -= rate * (scale * gradient[i])
    else:
        for i in range(weights.size):
            weights[i] -= rate * (scale * gradient[i] + decay_ * weights[i])


@njit(cache=True, error_model="numpy")
def momentum(weights, gradient, velocity, spare, scale, rate, beta, nesterov, decay):
    """See `reference.momentum`."""
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


@njit(cache=True, error_model="numpy")
def adam(weights, gradient, m, v, spare, scale, rate, beta1, beta2, eps, decay, correction1, correction2):
    """See `reference.adam`."""
    real = weights.dtype.type
    gain1, gain2, root = real(1.0 - beta1), real(1.0 - beta2), real(1.0 / math.sqrt(correction2))
    scale, pace, eps, decay_ = real(scale), real(rate / correction1), real(eps), real(decay)
    coupled = decay != 0
    for i in range(weights.size):
        g = scale * gradient[i]
        if coupled:
            g += decay_ * weights[i]
        a = m[i] + gain1 * (g - m[i])
        b = v[i] + gain2 * (g * g - v[i])
        m[i] = a
        v[i] = b
        weights[i] -= pace * (a / (root * np.sqrt(b) + eps))


@njit(cache=True, error_model="numpy")
def adamw(weights, gradient, m, v, spare, scale, rate, beta1, beta2, eps, decay, correction1, correction2):
    """See `reference.adamw`."""
    real = weights.dtype.type
    gain1, gain2, root = real(1.0 - beta1), real(1.0 - beta2), real(1.0 / math.sqrt(correction2))
    scale, pace, eps, keep = real(scale), real(rate / correction1), real(eps), real(1.0 - rate * decay)
    for i in range(weights.size):
        g = scale * gradient[i]
        a = m[i] + gain1 * (g - m[i])
        b = v[i] + gain2 * (g * g - v[i])
        m[i] = a
        v[i] = b
        weights[i] = keep * weights[i] - pace * (a / (root * np.sqrt(b) + eps))


@njit(cache=True, error_model="numpy")
def lamb_moments(gradient, m, v, spare, scale, beta1, beta2):
    """See `reference.lamb_moments`."""
    real = m.dtype.type
    scale, gain1, gain2 = real(scale), real(1.0 - beta1), real(1.0 - beta2)
    for i in range(m.size):
        g = scale * gradient[i]
        m[i] += gain1 * (g - m[i])
        v[i] += gain2 * (g * g - v[i])


@njit(cache=True, error_model="numpy")
def lamb_direction(weights, m, v, spare, eps, decay, correction1, correction2):
    """See `reference.lamb_direction`."""
    real = weights.dtype.type
    heal, root, eps, decay_ = real(1.0 / correction1), real(1.0 / math.sqrt(correction2)), real(eps), real(decay)
    u = spare[0, : weights.size]
    for i in range(weights.size):
        u[i] = heal * (m[i] / (root * np.sqrt(v[i]) + eps))
    if decay != 0:
        for i in range(weights.size):
            u[i] += decay_ * weights[i]
    return u


@njit(cache=True, error_model="numpy")
def lamb(weights, m, v, spare, rate, eps, decay, correction1, correction2):
    """See `reference.lamb`."""
    real = weights.dtype.type
    rate = real(rate)
    u = lamb_direction(weights, m, v, spare, eps, decay, correction1, correction2)
    for i in range(weights.size):
        weights[i] -= rate * u[i]


@njit(cache=True, error_model="numpy")
def squares(x, block, spare, out):
    """See `reference.squares`."""
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
