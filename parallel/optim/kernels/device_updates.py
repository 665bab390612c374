"""Optimizer updates as in `reference_updates`, each a single kernel of CuPy: one pass over memory.

Operations and roundings are those of the reference: `mul_rn` and its like are rounded by themselves, never fused. Only
`lamb_direction` needs `spare`, one row.
"""

import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from parallel.optim.kernels.reference_updates import Scalars
from quant.types import Array

PREAMBLE = "\n".join(
    f"__device__ {real} {name}_rn({real} a, {real} b) {{ return __{letter}{name}_rn(a, b); }}"
    for real, letter in (("float", "f"), ("double", "d"))
    for name in ("add", "sub", "mul", "div")
)
PREAMBLE += """
__device__ float sqrt_rn(float a) { return __fsqrt_rn(a); }
__device__ double sqrt_rn(double a) { return __dsqrt_rn(a); }
"""

FOLD = 8
"""Terms that one thread of `squares` adds."""

SPARE_TERMS = FOLD - 1
"""Elements for which `squares` needs one element of scratch memory."""

GRADIENT = """
    auto g = mul_rn(gradient, scale);
    if (decay != 0) g = add_rn(g, mul_rn(weights, decay));
"""
MOMENTS = """
    m = add_rn(m, mul_rn(sub_rn(g, m), gain1));
    v = add_rn(v, mul_rn(sub_rn(mul_rn(g, g), v), gain2));
"""
ADAM = f"""
    {GRADIENT} {MOMENTS}
    auto r = div_rn(m, add_rn(mul_rn(sqrt_rn(v), root), eps));
    weights = sub_rn(mul_rn(weights, factor), mul_rn(r, pace));
"""
DIRECTION = """
    auto u = mul_rn(div_rn(m, add_rn(mul_rn(sqrt_rn(v), root), eps)), heal);
    if (decay != 0) u = add_rn(u, mul_rn(weights, decay));
"""

KERNELS = {
    "sgd": ("gradient", "scale rate decay", "weights", f"{GRADIENT} weights = sub_rn(weights, mul_rn(g, rate));"),
    "momentum": (
        "gradient",
        "scale rate decay beta",
        "weights velocity",
        f"{GRADIENT} velocity = add_rn(mul_rn(velocity, beta), g); weights = sub_rn(weights, mul_rn(velocity, rate));",
    ),
    "nesterov": (
        "gradient",
        "scale rate decay beta",
        "weights velocity",
        f"""{GRADIENT} velocity = add_rn(mul_rn(velocity, beta), g);
        weights = sub_rn(weights, mul_rn(add_rn(g, mul_rn(velocity, beta)), rate));""",
    ),
    "adam": ("gradient", "scale decay gain1 gain2 root eps pace factor", "weights m v", ADAM),
    "lamb_moments": ("gradient", "scale gain1 gain2", "m v", f"auto g = mul_rn(gradient, scale); {MOMENTS}"),
    "lamb_direction": ("weights m v", "heal decay root eps", "direction", f"{DIRECTION} direction = u;"),
    "lamb": ("m v", "heal decay root eps rate", "weights", f"{DIRECTION} weights = sub_rn(weights, mul_rn(u, rate));"),
    "average": ("weights", "keep gain", "ema", "ema = add_rn(mul_rn(ema, keep), mul_rn(weights, gain));"),
}
"""Arrays read, scalars, arrays written (and read), and body of each kernel, all of one type."""


@cache
def _kernel(name: str, dtype: np.dtype[Any]) -> Callable[..., Any]:
    reads, scalars, writes, body = KERNELS[name]
    takes = [f"{dtype.name} {one}" for one in f"{reads} {scalars}".split()]
    gives = [f"{dtype.name} {one}" for one in writes.split()]
    return _elementwise(", ".join(takes), ", ".join(gives), body, f"{name}_{dtype.name}")


def _elementwise(takes: str, gives: str, body: str, name: str) -> Callable[..., Any]:
    made: Callable[..., Any] = sys.modules["cupy"].ElementwiseKernel(takes, gives, body, name, preamble=PREAMBLE)
    return made


def _run(name: str, reads: tuple[Array, ...], scalars: Scalars, *writes: Array) -> None:
    """Run a kernel; scalars are rounded to the arrays' type first, as those of NumPy's functions are."""
    dtype = writes[0].dtype
    _kernel(name, dtype)(*reads, *map(dtype.type, scalars), *writes)


def sgd(weights: Array, gradient: Array, spare: Array, scalars: Scalars) -> None:
    _run("sgd", (gradient,), scalars, weights)


def momentum(weights: Array, gradient: Array, velocity: Array, spare: Array, scalars: Scalars, nesterov: bool) -> None:
    _run("nesterov" if nesterov else "momentum", (gradient,), scalars, weights, velocity)


def adam(weights: Array, gradient: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> None:
    _adam(weights, gradient, m, v, scalars, scalars[2], 1.0)


def adamw(weights: Array, gradient: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> None:
    _adam(weights, gradient, m, v, scalars, 0.0, 1.0 - scalars[1] * scalars[2])


def _adam(weights: Array, gradient: Array, m: Array, v: Array, scalars: Scalars, coupled: float, factor: float) -> None:
    """Update of Adam (weight decay `coupled`, added to the gradient) or AdamW (weights multiplied by `factor`)."""
    scale, rate, _, beta1, beta2, eps, correction1, correction2 = scalars
    gains, root = (1.0 - beta1, 1.0 - beta2), 1.0 / math.sqrt(correction2)
    _run("adam", (gradient,), (scale, coupled, *gains, root, eps, rate / correction1, factor), weights, m, v)


def lamb_moments(gradient: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> None:
    scale, _, _, beta1, beta2, _, _, _ = scalars
    _run("lamb_moments", (gradient,), (scale, 1.0 - beta1, 1.0 - beta2), m, v)


def lamb_direction(weights: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> Array:
    u = spare[0, : len(weights)]
    _run("lamb_direction", (weights, m, v), _direction_scalars(scalars), u)
    return u


def lamb(weights: Array, m: Array, v: Array, spare: Array, scalars: Scalars) -> None:
    _run("lamb", (m, v), (*_direction_scalars(scalars), scalars[1]), weights)


def _direction_scalars(scalars: Scalars) -> Scalars:
    _, _, decay, _, _, eps, correction1, correction2 = scalars
    return 1.0 / correction1, decay, 1.0 / math.sqrt(correction2), eps


def average(weights: Array, ema: Array, spare: Array, keep: float, gain: float) -> None:
    _run("average", (weights,), (keep, gain), ema)


def squares(x: Array, block: int, spare: Array, out: Array) -> None:
    """As the reference, with three levels of the tree a kernel: `spare` holds the terms that are left.

    A thread adds elements that lie a part of the block apart, so that neighbouring threads read neighbours.
    """
    terms, width, at = x, block, 0
    while width > 1:
        fold = min(FOLD, width)
        width //= fold
        count = len(out) * width
        into = spare[at : at + count] if width > 1 else out
        parts = terms.reshape(len(out), fold, width)
        _fold(terms.dtype, fold, terms is x)(*(parts[:, part] for part in range(fold)), into.reshape(len(out), width))
        terms, at = into, at + count


@cache
def _fold(dtype: np.dtype[Any], count: int, squared: bool) -> Callable[..., Any]:
    """Kernel that adds `count` terms (squares of them) by a tree: those of the first half to those of the second."""
    terms = range(count)
    lines = [f"double t{term} = x{term};" for term in terms]
    lines += [f"t{term} = mul_rn(t{term}, t{term});" for term in terms] if squared else []
    while count > 1:
        count //= 2
        lines += [f"t{term} = add_rn(t{term}, t{count + term});" for term in range(count)]
    takes = ", ".join(f"{dtype.name} x{term}" for term in terms)
    name = f"add_{len(terms)}_{'squares' if squared else 'terms'}_{dtype.name}"
    return _elementwise(takes, "float64 y", " ".join([*lines, "y = t0;"]), name)
