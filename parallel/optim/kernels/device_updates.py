"""Optimizer updates as in `reference_updates`, each one CuPy kernel for all tensors: one pass over memory.

Formulas are those of `updates.h`, and the bits those of the host, as nothing is fused. The scalars of a call are those
of several runs of elements: `RunScalars`. Only `lamb_direction` needs `spare`, one row.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from parallel.nn.flat_params import BLOCK
from parallel.optim.kernels.reference_updates import KernelScalars, Scalars
from quant.kernels import headers
from quant.types import Array

OPTIONS = ("--fmad=false",)
"""Every operation is rounded by itself."""

FOLD = 8
"""Terms that one thread of `squares` adds."""

SPARE_TERMS = FOLD - 1
"""Elements for which `squares` needs one element of scratch memory."""

ARGUMENTS = {
    "sgd": "&weights gradient",
    "momentum": "&weights gradient &velocity",
    "nesterov": "&weights gradient &velocity",
    "adam": "&weights gradient &m &v",
    "lamb_moments": "gradient &m &v",
    "lamb_direction": "weights m v &direction",
    "lamb": "&weights m v",
}
"""Arrays of the formulas of `updates.h`, with & those that are written; scalars follow."""

COLUMNS = 1 + len(KernelScalars._fields)
"""Of a table of scalars: 1 or, for a run that is not updated, 0, and `KernelScalars`."""


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


def empty_table(runs: int, dtype: np.dtype[Any]) -> Array:
    """Uninitialised array of the size of a table of scalars of so many runs."""
    return sys.modules["cupy"].empty(runs * COLUMNS, dtype)


@cache
def _formulas(dtype: np.dtype[Any]) -> str:
    real, root = ("float", "sqrtf") if dtype == np.float32 else ("double", "sqrt")
    text = headers.text(headers.PORTABLE, ("parallel.optim.kernels", "updates.h"))
    return f"#define REAL {real}\n#define ROOT {root}\n#define NAME(name) name\n{text}"


def _elementwise(takes: str, gives: str, body: str, name: str, preamble: str = "") -> Callable[..., Any]:
    cupy = sys.modules["cupy"]
    made: Callable[..., Any] = cupy.ElementwiseKernel(takes, gives, body, name, preamble=preamble, options=OPTIONS)
    return made


@cache
def _kernel(name: str, dtype: np.dtype[Any]) -> Callable[..., Any]:
    arguments = ARGUMENTS[name].split()
    takes = [f"{dtype.name} {one}" for one in arguments if one[0] != "&"]
    gives = [f"{dtype.name} {one[1:]}" for one in arguments if one[0] == "&"]
    body = f"""const int at = number[i / {BLOCK}] * {COLUMNS};
    if (table[at] != 0) {name}({", ".join(arguments)}, *(const Scalars *)&table[at + 1]);"""
    takes += ["raw int32 number", f"raw {dtype.name} table"]
    return _elementwise(", ".join(takes), ", ".join(gives), body, f"{name}_{dtype.name}", _formulas(dtype))


def _run(name: str, scalars: RunScalars, combined: Callable[[Scalars], KernelScalars], *arrays: Array) -> None:
    """Run a kernel with the scalars ``combined(scalars)`` of each run, rounded to the arrays' type as NumPy does.

    The kernel reads them from a table, which is copied to the device in stream order.
    """
    dtype = arrays[0].dtype
    rows = [(0.0,) * COLUMNS if one is None else (1.0, *combined(one)) for one in scalars.runs]
    table = sys.modules["cupy"].asarray(np.array(rows, dtype).reshape(-1))
    is_written = [one[0] == "&" for one in ARGUMENTS[name].split()]
    reads, writes = ([one for one, own in zip(arrays, is_written) if own == kind] for kind in (False, True))
    _kernel(name, dtype)(*reads, scalars.numbers, table, *writes)


def _of_sgd(scalars: Scalars) -> KernelScalars:
    return KernelScalars(*scalars)


def _of_adamw(scalars: Scalars) -> KernelScalars:
    return KernelScalars.of_moments(scalars, decoupled=True)


def sgd(weights: Array, gradient: Array, spare: Array, scalars: RunScalars) -> None:
    _run("sgd", scalars, _of_sgd, weights, gradient)


def momentum(
    weights: Array, gradient: Array, velocity: Array, spare: Array, scalars: RunScalars, nesterov: bool
) -> None:
    _run("nesterov" if nesterov else "momentum", scalars, _of_sgd, weights, gradient, velocity)


def adam(weights: Array, gradient: Array, m: Array, v: Array, spare: Array, scalars: RunScalars) -> None:
    _run("adam", scalars, KernelScalars.of_moments, weights, gradient, m, v)


def adamw(weights: Array, gradient: Array, m: Array, v: Array, spare: Array, scalars: RunScalars) -> None:
    _run("adam", scalars, _of_adamw, weights, gradient, m, v)


def lamb_moments(gradient: Array, m: Array, v: Array, spare: Array, scalars: RunScalars) -> None:
    _run("lamb_moments", scalars, KernelScalars.of_moments, gradient, m, v)


def lamb_direction(weights: Array, m: Array, v: Array, spare: Array, scalars: RunScalars) -> Array:
    u = spare[0, : len(weights)]
    u[...] = 0
    _run("lamb_direction", scalars, KernelScalars.of_moments, weights, m, v, u)
    return u


def lamb(weights: Array, m: Array, v: Array, spare: Array, scalars: RunScalars) -> None:
    _run("lamb", scalars, KernelScalars.of_moments, weights, m, v)


def average(weights: Array, ema: Array, spare: Array, keep: float, gain: float) -> None:
    real = weights.dtype.type
    _average(weights.dtype)(weights, real(keep), real(gain), ema)


@cache
def _average(dtype: np.dtype[Any]) -> Callable[..., Any]:
    takes = ", ".join(f"{dtype.name} {one}" for one in ("weights", "keep", "gain"))
    body = "Scalars s = {}; s.keep = keep; s.gain1 = gain; average(weights, &ema, s);"
    return _elementwise(takes, f"{dtype.name} ema", body, f"average_{dtype.name}", _formulas(dtype))


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
    lines += [f"t{term} *= t{term};" for term in terms] if squared else []
    while count > 1:
        count //= 2
        lines += [f"t{term} += t{count + term};" for term in range(count)]
    takes = ", ".join(f"{dtype.name} x{term}" for term in terms)
    name = f"add_{len(terms)}_{'squares' if squared else 'terms'}_{dtype.name}"
    return _elementwise(takes, "float64 y", " ".join([*lines, "y = t0;"]), name)
