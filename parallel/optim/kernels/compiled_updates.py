"""Optimizer updates as in `reference_updates`, but in one pass over memory, in C for host arrays.

Operations and roundings are those of the reference, without reordering or fusing: the bits are the same. Only LAMB's
direction and `squares` need `spare`.
"""

from parallel.optim.kernels import _updates  # type: ignore[attr-defined]
from parallel.optim.kernels.reference_updates import SPARE_TERMS as SPARE_TERMS
from parallel.optim.kernels.reference_updates import KernelScalars, Scalars
from quant.types import Array


def sgd(weights: Array, gradient: Array, spare: Array, scalars: Scalars) -> None:
    _updates.sgd(weights, gradient, *KernelScalars(*scalars))


def momentum(weights: Array, gradient: Array, velocity: Array, spare: Array, scalars: Scalars, nesterov: bool) -> None:
    update = _updates.nesterov if nesterov else _updates.momentum
    update(weights, gradient, velocity, *KernelScalars(*scalars))


def adam(weights: Array, gradient: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> None:
    _updates.adam(weights, gradient, m, v, *KernelScalars.of_moments(scalars))


def adamw(weights: Array, gradient: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> None:
    _updates.adam(weights, gradient, m, v, *KernelScalars.of_moments(scalars, decoupled=True))


def lamb_moments(gradient: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> None:
    _updates.lamb_moments(gradient, m, v, *KernelScalars.of_moments(scalars))


def lamb_direction(weights: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> Array:
    u = spare[0, : len(weights)]
    _updates.lamb_direction(weights, m, v, u, *KernelScalars.of_moments(scalars))
    return u


def lamb(weights: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> None:
    _updates.lamb(weights, m, v, *KernelScalars.of_moments(scalars))


def average(weights: Array, ema: Array, spare: Array, keep: float, gain: float) -> None:
    _updates.average(weights, ema, *KernelScalars(gain1=gain, keep=keep))


def squares(x: Array, block: int, spare: Array, out: Array) -> None:
    _updates.squares(x, block, spare, out)
