"""Elementwise kernels for CuPy, each fused into a single GPU kernel, generated from the reference kernels.

`cupy.fuse` traces a function with stand-ins for its arrays and makes a kernel of it, cached per dtypes, so formulas
exist once. For CuPy arrays of float16, float32 and float64, and of bfloat16 by casts, which `cupy.fuse` does not know.
"""

import sys
from collections.abc import Callable
from functools import cache
from inspect import unwrap
from typing import Any

import numpy as np

from parallel.nn.kernels import reference_kernels
from parallel.nn.kernels.storage import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, narrow, widen
from quant.types import Array

TYPES = frozenset((FLOAT16, FLOAT32, FLOAT64, BFLOAT16))


def suits(x: Any) -> bool:
    """True if `x` is a CuPy array of a floating-point type, which the fused kernels accept."""
    return not isinstance(x, np.ndarray | np.generic) and x.dtype in TYPES


@cache
def _one_kernel(chain: Callable[..., None], name: str) -> Callable[..., None]:
    kernel: Callable[..., None] = sys.modules["cupy"].fuse(kernel_name=name)(chain)
    return kernel


def _elementwise(compute: Callable[..., Array]) -> Callable[..., Array]:
    """Fuse an elementwise float32/float64 function into one GPU kernel, for CuPy arrays of any dtype in `TYPES`."""

    def chain(y: Array, *arguments: Any) -> None:
        y[...] = compute(*map(widen, arguments))

    def kernel(x: Array, *others: Any, out: Array | None = None) -> Array:
        if x.dtype == BFLOAT16:
            return narrow(kernel(*map(_widen_bfloat16, (x, *others))), BFLOAT16, out)
        y = sys.modules["cupy"].empty(x.shape, x.dtype) if out is None else out
        _one_kernel(chain, compute.__name__)(y, x, *others)
        return y

    return kernel


def _widen_bfloat16(value: Any) -> Any:
    """Argument of a fused kernel: an array of bfloat16 as one of float32, all others as they are."""
    return widen(value) if getattr(value, "dtype", None) == BFLOAT16 else value


def _biased(compute: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """Fused GPU kernel from an activation f: it adds the bias to z in place and returns f(z + bias)."""
    unbiased = _elementwise(compute)

    def chain(y: Array, z: Array, bias: Array) -> None:
        z += bias
        y[...] = compute(widen(z))

    def kernel(z: Array, bias: Array) -> Array:
        if z.dtype == BFLOAT16:
            z += bias
            return unbiased(z)
        y = sys.modules["cupy"].empty(z.shape, z.dtype)
        _one_kernel(chain, f"biased_{compute.__name__}")(y, z, bias)
        return y

    return kernel


def _biased_relu(z: Array, bias: Array) -> Array:
    if z.dtype == BFLOAT16:
        z += bias
        return FUSED["relu"](z, out=z)
    _one_kernel(_relu_in_place, "biased_relu")(z, bias)
    return z


def _relu_in_place(z: Array, bias: Array) -> None:
    z += bias
    z[...] = unwrap(reference_kernels.relu)(widen(z))


ACTIVATIONS = (reference_kernels.gelu, reference_kernels.gelu_tanh, reference_kernels.silu)
CHAINS = (
    *ACTIVATIONS,
    reference_kernels.relu,
    reference_kernels.relu_backward,
    reference_kernels.gelu_backward,
    reference_kernels.gelu_tanh_backward,
    reference_kernels.silu_backward,
    reference_kernels.masked,
)
FUSED: dict[str, Callable[..., Array]] = {chain.__name__: _elementwise(unwrap(chain)) for chain in CHAINS}
FUSED |= {f"biased_{activation.__name__}": _biased(unwrap(activation)) for activation in ACTIVATIONS}
FUSED["biased_relu"] = _biased_relu
