"""Reference updates of the optimizers, element by element, for vectors of equal length.

`weights`, `gradient` and the state vectors have one dtype, float32 or float64; scalars are first combined in double
precision. `spare` is scratch memory of that dtype, of shape (2, at least n). Every operation rounds by itself, so
results do not depend on where a vector is cut. Below, g is the gradient of the papers: `gradient` times `scale`.
"""

import math
from typing import NamedTuple, Self

import numpy as np

from quant.types import Array

SPARE_TERMS = 1
"""Elements for which `squares` needs one element of scratch memory."""

Scalars = tuple[float, ...]
"""(scale, rate, decay), then momentum for SGD, or (beta1, beta2, eps, correction1, correction2) for Adam and LAMB, with
corrections 1 - beta^t."""


class KernelScalars(NamedTuple):
    """Scalars of a formula of `updates.h`, in the order there, combined in double precision; 0 if it does not use them.

    ``KernelScalars(*scalars)`` are those of SGD.
    """

    scale: float = 0.0  # of the gradient
    rate: float = 0.0
    decay: float = 0.0  # times the weights is added to the gradient, or to LAMB's direction
    beta: float = 0.0  # momentum
    gain1: float = 0.0  # 1 - beta1, or the share of the weights in a moving average
    gain2: float = 0.0  # 1 - beta2
    eps: float = 0.0
    root: float = 0.0  # corrects the root of the second moment: 1 / sqrt(1 - beta2^t)
    heal: float = 0.0  # corrects the first moment: 1 / (1 - beta1^t)
    pace: float = 0.0  # heal times rate
    keep: float = 0.0  # factor of the weights in AdamW, or of a moving average

    @classmethod
    def of_moments(cls, scalars: Scalars, decoupled: bool = False) -> Self:
        """Scalars of Adam and LAMB; `decoupled` decay is a factor of the weights."""
        scale, rate, decay, beta1, beta2, eps, correction1, correction2 = scalars
        added, keep = (0.0, 1.0 - rate * decay) if decoupled else (decay, 1.0)
        root = 1.0 / math.sqrt(correction2)
        gain1, gain2, heal, pace = 1.0 - beta1, 1.0 - beta2, 1.0 / correction1, rate / correction1
        return cls(scale, rate, added, 0.0, gain1, gain2, eps, root, heal, pace, keep)


def sgd(weights: Array, gradient: Array, spare: Array, scalars: Scalars) -> None:
    """Update weights by SGD without momentum: w -= rate (g + decay w)."""
    scale, rate, decay = scalars
    g = _gradient(weights, gradient, spare, scale, decay)
    np.multiply(g, rate, out=g)
    np.subtract(weights, g, out=weights)


def momentum(weights: Array, gradient: Array, velocity: Array, spare: Array, scalars: Scalars, nesterov: bool) -> None:
    """Update by SGD with momentum, u = beta u + g + decay w: w -= rate u, or (Nesterov) rate (g + decay w + beta u)."""
    scale, rate, decay, beta = scalars
    g, t = _gradient(weights, gradient, spare, scale, decay), spare[1, : len(weights)]
    np.multiply(velocity, beta, out=velocity)
    np.add(velocity, g, out=velocity)
    if nesterov:
        np.multiply(velocity, beta, out=t)
        np.add(g, t, out=g)
        np.multiply(g, rate, out=g)
    else:
        np.multiply(velocity, rate, out=g)
    np.subtract(weights, g, out=weights)


def adam(weights: Array, gradient: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> None:
    """Update by Adam with L2 decay: moments m, v of g + decay w; w -= rate m^ / (sqrt(v^) + eps), bias-corrected."""
    scale, rate, decay, beta1, beta2, eps, correction1, correction2 = scalars
    g, t = _gradient(weights, gradient, spare, scale, decay), spare[1, : len(weights)]
    _moments(g, m, v, spare, beta1, beta2)
    _denominator(v, eps, correction2, t)
    np.divide(m, t, out=t)
    np.multiply(t, rate / correction1, out=t)
    np.subtract(weights, t, out=weights)


def adamw(weights: Array, gradient: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> None:
    """Update by AdamW: w -= rate decay w, then `adam` without decay."""
    scale, rate, decay, *others = scalars
    if decay:
        np.multiply(weights, 1.0 - rate * decay, out=weights)
    adam(weights, gradient, m, v, spare, (scale, rate, 0.0, *others))


def lamb_moments(gradient: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> None:
    """Update the moments m and v with gradient g: first part of LAMB's step."""
    scale, _, _, beta1, beta2, _, _, _ = scalars
    g = spare[0, : len(gradient)]
    np.multiply(gradient, scale, out=g)
    _moments(g, m, v, spare, beta1, beta2)


def lamb_direction(weights: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> Array:
    """Unscaled LAMB step m^ / (sqrt(v^) + eps) + decay w, written to the first row of `spare` and returned."""
    _, _, decay, _, _, eps, correction1, correction2 = scalars
    u, t = spare[0, : len(weights)], spare[1, : len(weights)]
    _denominator(v, eps, correction2, u)
    np.divide(m, u, out=u)
    np.multiply(u, 1.0 / correction1, out=u)
    if decay:
        np.multiply(weights, decay, out=t)
        np.add(u, t, out=u)
    return u


def lamb(weights: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> None:
    """Update weights by LAMB, after `lamb_moments`: w -= rate `lamb_direction`; the rate includes the trust ratio."""
    u = lamb_direction(weights, m, v, spare, scalars)
    np.multiply(u, scalars[1], out=u)
    np.subtract(weights, u, out=weights)


def average(weights: Array, ema: Array, spare: Array, keep: float, gain: float) -> None:
    """Update a moving average: ema = keep ema + gain w."""
    new = spare[0, : len(weights)]
    np.multiply(weights, gain, out=new)
    np.multiply(ema, keep, out=ema)
    np.add(ema, new, out=ema)


def squares(x: Array, block: int, spare: Array, out: Array) -> None:
    """Write the sum of squares of each block of x to `out`, in float64, added in a fixed order (pairwise tree).

    `x` has whole blocks of `block` elements, a power of two; `spare` is float64, of at least len(x) / `SPARE_TERMS`
    elements, `out` float64 of shape (len(x) / block,).
    """
    terms = spare[: len(x)]
    terms[...] = x
    np.multiply(terms, terms, out=terms)
    terms = terms.reshape(-1, block)
    while block > 1:
        block //= 2
        np.add(terms[:, :block], terms[:, block : 2 * block], out=terms[:, :block])
    out[...] = terms[:, 0]


def _gradient(weights: Array, gradient: Array, spare: Array, scale: float, decay: float) -> Array:
    """Gradient with L2 decay, scale * gradient + decay * w, written to the first row of `spare` and returned."""
    g, t = spare[0, : len(weights)], spare[1, : len(weights)]
    np.multiply(gradient, scale, out=g)
    if decay:
        np.multiply(weights, decay, out=t)
        np.add(g, t, out=g)
    return g


def _moments(g: Array, m: Array, v: Array, spare: Array, beta1: float, beta2: float) -> None:
    """Update Adam's moments in place: m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g g."""
    t = spare[1, : len(g)]
    np.subtract(g, m, out=t)
    np.multiply(t, 1.0 - beta1, out=t)
    np.add(m, t, out=m)
    np.multiply(g, g, out=t)
    np.subtract(t, v, out=t)
    np.multiply(t, 1.0 - beta2, out=t)
    np.add(v, t, out=v)


def _denominator(v: Array, eps: float, correction2: float, out: Array) -> None:
    """Write Adam's denominator to `out`: sqrt(v / correction2) + eps."""
    np.sqrt(v, out=out)
    np.multiply(out, 1.0 / math.sqrt(correction2), out=out)
    np.add(out, eps, out=out)
