"""Formulas of `updates.h`, each one CuPy kernel for all tensors: one pass over memory.

The bits equal the host's, as nothing is fused. A call has scalars for several runs of elements: `RunScalars`.
"""

import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from parallel.nn.flat_params import BLOCK
from parallel.optim.kernels.scalars import RunScalars, Scalars
from quant.kernels import headers
from quant.types import Array

OPTIONS = ("--fmad=false",)
"""Every operation is rounded by itself."""

FOLD = 8
"""Terms that one thread of `squares` adds."""

SPARE_TERMS = FOLD - 1
"""Elements for which `squares` needs one element of scratch memory."""

COLUMNS = 1 + len(Scalars._fields)
"""Of a table of scalars: 1 or, for a run that is not updated, 0, and `Scalars`."""

SIGNATURE = re.compile(r"INLINE void NAME\((\w+)\)\((.*), NAME\(Scalars\) s\)")
"""Of a formula in `updates.h`: its name and the arrays, with * those that are written."""


def run_numbers(lengths: Sequence[int]) -> Array:
    """Number of the run of each block (`RunScalars.numbers`), for runs of these lengths."""
    blocks = np.array(lengths, np.int64) // BLOCK
    return sys.modules["cupy"].asarray(np.repeat(np.arange(len(lengths), dtype=np.int32), blocks))


def empty_table(runs: int, dtype: np.dtype[Any]) -> Array:
    """Uninitialised array of the size of a table of scalars of `runs` runs."""
    return sys.modules["cupy"].empty(runs * COLUMNS, dtype)


@cache
def _formulas(dtype: np.dtype[Any]) -> str:
    real, root = ("float", "sqrtf") if dtype == np.float32 else ("double", "sqrt")
    text = headers.text(headers.PORTABLE, ("parallel.optim.kernels", "updates.h"))
    return f"#define REAL {real}\n#define ROOT {root}\n#define NAME(name) name\n{text}"


@cache
def _arguments(name: str) -> tuple[str, ...]:
    """Arrays of a formula, with & those that are written."""
    arguments = dict(SIGNATURE.findall(_formulas(np.dtype(np.float32))))[name].replace("REAL ", "").replace("*", "&")
    return tuple(arguments.split(", "))


def _elementwise(takes: str, gives: str, body: str, name: str, preamble: str = "") -> Callable[..., Any]:
    cupy = sys.modules["cupy"]
    made: Callable[..., Any] = cupy.ElementwiseKernel(takes, gives, body, name, preamble=preamble, options=OPTIONS)
    return made


@cache
def _kernel(name: str, dtype: np.dtype[Any]) -> Callable[..., Any]:
    arguments = _arguments(name)
    takes = [f"{dtype.name} {one}" for one in arguments if one[0] != "&"]
    gives = [f"{dtype.name} {one[1:]}" for one in arguments if one[0] == "&"]
    body = f"""const int at = number[i / {BLOCK}] * {COLUMNS};
    if (table[at] != 0) {name}({", ".join(arguments)}, *(const Scalars *)&table[at + 1]);"""
    takes += ["raw int32 number", f"raw {dtype.name} table"]
    return _elementwise(", ".join(takes), ", ".join(gives), body, f"{name}_{dtype.name}", _formulas(dtype))


def run(name: str, scalars: RunScalars, *arrays: Array) -> None:
    """Run a kernel with the scalars of each run, rounded to the arrays' type as NumPy does.

    The kernel reads them from a table, copied to the device in stream order.
    """
    dtype = arrays[0].dtype
    rows = [(0.0,) * COLUMNS if one is None else (1.0, *one) for one in scalars.runs]
    table = sys.modules["cupy"].asarray(np.array(rows, dtype).reshape(-1))
    is_written = [one[0] == "&" for one in _arguments(name)]
    reads, writes = ([one for one, own in zip(arrays, is_written) if own == kind] for kind in (False, True))
    _kernel(name, dtype)(*reads, scalars.numbers, table, *writes)


def squares(x: Array, block: int, spare: Array, out: Array) -> None:
    """As the reference in `grad_norm`, with three levels of the tree a kernel: `spare` holds the terms that are left.

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
    """Kernel that adds `count` terms (or their squares) by a tree: the first half of the terms to the second half."""
    terms = range(count)
    lines = [f"double t{term} = x{term};" for term in terms]
    lines += [f"t{term} *= t{term};" for term in terms] if squared else []
    while count > 1:  # the reference's order, and so its bits
        count //= 2
        lines += [f"t{term} += t{count + term};" for term in range(count)]
    takes = ", ".join(f"{dtype.name} x{term}" for term in terms)
    name = f"add_{len(terms)}_{'squares' if squared else 'terms'}_{dtype.name}"
    return _elementwise(takes, "float64 y", " ".join([*lines, "y = t0;"]), name)
