"""Optimizer updates as in `reference_updates`, each one CuPy kernel for all tensors: one pass over memory.

Operations and roundings are those of the reference: `mul_rn` and its like are rounded by themselves, never fused. The
scalars of a call are those of several runs of elements: `RunScalars`. Only `lamb_direction` needs `spare`, one row.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from parallel.nn.flat_params import BLOCK
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
}
"""Arrays read, scalars of a run, arrays written (and read), and body of each kernel, all of one type."""


class RunScalars(NamedTuple):
    """Scalars of several runs of elements: those of each run, or None where it is not updated.

    `numbers`, an int32 array on the device, has the number of the run of each block of `BLOCK` elements.
    """

    runs: Sequence[Scalars | None]
    numbers: Array

    def of_blocks(self, part: slice) -> "RunScalars":
        """Scalars of the elements `part`, which are whole blocks."""
        return self._replace(numbers=self.numbers[part.start // BLOCK : part.stop // BLOCK])


def run_numbers(lengths: Sequence[int]) -> Array:
    """`RunScalars.numbers` for runs of so many elements."""
    blocks = np.array(lengths, np.int64) // BLOCK
    return sys.modules["cupy"].asarray(np.repeat(np.arange(len(lengths), dtype=np.int32), blocks))


def largest_table(runs: int, dtype: np.dtype[Any]) -> Array:
    """Uninitialised array of the size of the largest table of scalars of so many runs, of any kernel."""
    columns = max(len(scalars.split()) for _, scalars, _, _ in KERNELS.values())
    return sys.modules["cupy"].empty(runs * (1 + columns), dtype)


@cache
def _kernel(name: str, dtype: np.dtype[Any]) -> Callable[..., Any]:
    reads, scalars, writes, body = KERNELS[name]
    columns = ["updated", *scalars.split()]
    places = " ".join(f"const auto {one} = table[at + {column}];" for column, one in enumerate(columns))
    takes = [f"{dtype.name} {one}" for one in reads.split()] + ["raw int32 number", f"raw {dtype.name} table"]
    gives = [f"{dtype.name} {one}" for one in writes.split()]
    text = f"const int at = number[i / {BLOCK}] * {len(columns)}; {places} if (updated != 0) {{ {body} }}"
    return _elementwise(", ".join(takes), ", ".join(gives), text, f"{name}_{dtype.name}")


def _elementwise(takes: str, gives: str, body: str, name: str) -> Callable[..., Any]:
    made: Callable[..., Any] = sys.modules["cupy"].ElementwiseKernel(takes, gives, body, name, preamble=PREAMBLE)
    return made


def _run(
    name: str, reads: Sequence[Array], scalars: RunScalars, of_run: Callable[[Scalars], Scalars], *writes: Array
) -> None:
    """Run a kernel with the scalars ``of_run(scalars)`` of each run, rounded to the arrays' type as NumPy does.

    The kernel reads them from a table, which is copied to the device in stream order.
    """
    count = 1 + len(KERNELS[name][1].split())
    rows = [(0.0,) * count if one is None else (1.0, *of_run(one)) for one in scalars.runs]
    table = sys.modules["cupy"].asarray(np.array(rows, writes[0].dtype).reshape(-1))
    _kernel(name, writes[0].dtype)(*reads, scalars.numbers, table, *writes)


def _same(scalars: Scalars) -> Scalars:
    return scalars


def sgd(weights: Array, gradient: Array, spare: Array, scalars: RunScalars) -> None:
    _run("sgd", (gradient,), scalars, _same, weights)


def momentum(
    weights: Array, gradient: Array, velocity: Array, spare: Array, scalars: RunScalars, nesterov: bool
) -> None:
    _run("nesterov" if nesterov else "momentum", (gradient,), scalars, _same, weights, velocity)


def adam(weights: Array, gradient: Array, m: Array, v: Array, spare: Array, scalars: RunScalars) -> None:
    _run("adam", (gradient,), scalars, lambda one: _adam(one, one[2], 1.0), weights, m, v)


def adamw(weights: Array, gradient: Array, m: Array, v: Array, spare: Array, scalars: RunScalars) -> None:
    _run("adam", (gradient,), scalars, lambda one: _adam(one, 0.0, 1.0 - one[1] * one[2]), weights, m, v)


def _adam(scalars: Scalars, coupled: float, factor: float) -> Scalars:
    """Scalars of Adam (weight decay `coupled`, added to the gradient) or AdamW (weights multiplied by `factor`)."""
    scale, rate, _, beta1, beta2, eps, correction1, correction2 = scalars
    root, pace = 1.0 / math.sqrt(correction2), rate / correction1
    return scale, coupled, 1.0 - beta1, 1.0 - beta2, root, eps, pace, factor


def lamb_moments(gradient: Array, m: Array, v: Array, spare: Array, scalars: RunScalars) -> None:
    _run("lamb_moments", (gradient,), scalars, lambda one: (one[0], 1.0 - one[3], 1.0 - one[4]), m, v)


def lamb_direction(weights: Array, m: Array, v: Array, spare: Array, scalars: RunScalars) -> Array:
    u = spare[0, : len(weights)]
    u[...] = 0
    _run("lamb_direction", (weights, m, v), scalars, _direction, u)
    return u


def lamb(weights: Array, m: Array, v: Array, spare: Array, scalars: RunScalars) -> None:
    _run("lamb", (m, v), scalars, lambda one: (*_direction(one), one[1]), weights)


def _direction(scalars: Scalars) -> Scalars:
    _, _, decay, _, _, eps, correction1, correction2 = scalars
    return 1.0 / correction1, decay, 1.0 / math.sqrt(correction2), eps


def average(weights: Array, ema: Array, spare: Array, keep: float, gain: float) -> None:
    real = weights.dtype.type
    _average(weights.dtype)(weights, real(keep), real(gain), ema)


@cache
def _average(dtype: np.dtype[Any]) -> Callable[..., Any]:
    takes = ", ".join(f"{dtype.name} {one}" for one in ("weights", "keep", "gain"))
    body = "ema = add_rn(mul_rn(ema, keep), mul_rn(weights, gain));"
    return _elementwise(takes, f"{dtype.name} ema", body, f"average_{dtype.name}")


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
