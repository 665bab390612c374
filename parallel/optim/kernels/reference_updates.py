"""Reference updates of the optimizers, element by element, for NumPy and CuPy vectors of equal length.

`weights`, `gradient` and the state vectors have one dtype, float32 or float64; scalars are first combined in double
precision. Every operation rounds by itself, so results do not depend on where a vector is cut. Below, g is the gradient
of the papers: `gradient` times `scale`.
"""

from __future__ import annotations

import math

import numpy as np

from quant.types import Array

Scalars = tuple[float, ...]
"""(scale, rate, decay), then momentum for SGD, or (beta1, beta2, eps, correction1, correction2) for Adam and LAMB, with
corrections 1 - beta^t. Not a named tuple: numba takes 1 us longer to unbox one, a tenth of a portion's update."""


def sgd(weights: Array, gradient: Array, scalars: Scalars) -> None:
    """w -= rate (g + decay w)."""
    scale, rate, decay = scalars
    weights -= rate * _gradient(weights, gradient, scale, decay)


def momentum(weights: Array, gradient: Array, velocity: Array, scalars: Scalars, nesterov: bool) -> None:
    """u = beta u + g + decay w; w -= rate u, or with Nesterov's look-ahead rate (g + decay w + beta u)."""
    scale, rate, decay, beta = scalars
    g = _gradient(weights, gradient, scale, decay)
    velocity *= beta
    velocity += g
    weights -= rate * (g + beta * velocity if nesterov else velocity)


def adam(weights: Array, gradient: Array, m: Array, v: Array, scalars: Scalars) -> None:
    """g += decay w; then the two moments of g, and w -= rate m^ / (sqrt(v^) + eps)."""
    scale, rate, decay, beta1, beta2, eps, correction1, correction2 = scalars
    _moments(_gradient(weights, gradient, scale, decay), m, v, beta1, beta2)
    weights -= rate / correction1 * (m / _denominator(v, eps, correction2))


def adamw(weights: Array, gradient: Array, m: Array, v: Array, scalars: Scalars) -> None:
    """w -= rate decay w; then `adam` without decay."""
    scale, rate, decay, *others = scalars
    if decay:
        weights *= 1.0 - rate * decay
    adam(weights, gradient, m, v, (scale, rate, 0.0, *others))


def lamb_moments(gradient: Array, m: Array, v: Array, scalars: Scalars) -> None:
    """The two moments of g: the first half of LAMB's step."""
    scale, _, _, beta1, beta2, _, _, _ = scalars
    _moments(scale * gradient, m, v, beta1, beta2)


def lamb_direction(weights: Array, m: Array, v: Array, scalars: Scalars) -> Array:
    """LAMB's step before scaling: m^ / (sqrt(v^) + eps) + decay w."""
    _, _, decay, _, _, eps, correction1, correction2 = scalars
    u = 1.0 / correction1 * (m / _denominator(v, eps, correction2))
    return u + decay * weights if decay else u


def lamb(weights: Array, m: Array, v: Array, scalars: Scalars) -> None:
    """w -= rate `lamb_direction`, with the tensor's own rate: the second half of LAMB's step."""
    weights -= scalars[1] * lamb_direction(weights, m, v, scalars)


def squares(x: Array, block: int, out: Array) -> None:
    """Sum of squares of each block in float64, always added by the same tree: halves, quarters, ...

    `x` has whole blocks of `block` elements, a power of two; `out` is float64 of shape (len(x) / block,).
    """
    terms = np.multiply(x, x, dtype=np.float64).reshape(-1, block)
    while block > 1:
        block //= 2
        terms = terms[:, :block] + terms[:, block:]
    out[...] = terms[:, 0]


def _gradient(weights: Array, gradient: Array, scale: float, decay: float) -> Array:
    g = scale * gradient
    return g + decay * weights if decay else g


def _moments(g: Array, m: Array, v: Array, beta1: float, beta2: float) -> None:
    """m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g g, both as steps towards the new value."""
    m += (1.0 - beta1) * (g - m)
    v += (1.0 - beta2) * (g * g - v)


def _denominator(v: Array, eps: float, correction2: float) -> Array:
    """sqrt(v^) + eps."""
    return 1.0 / math.sqrt(correction2) * np.sqrt(v) + eps
