"""Chains of operations on elements as one kernel each on a GPU: CuPy compiles what the reference's functions do.

`cupy.fuse` calls a function once with stand-ins for its arrays, takes down what is done to them, and makes a kernel of
it, kept for further arrays of these types. So there is no second set of formulas. Same names as in `reference`, for
CuPy arrays of float16, float32 and float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from inspect import unwrap
from typing import Any

import numpy as np

from parallel.nn.kernels import reference
from parallel.nn.kernels.storage import FLOAT16, FLOAT32, FLOAT64, Array, widen

TYPES = frozenset((FLOAT16, FLOAT32, FLOAT64))


def suits(x: Any) -> bool:
    """Whether an array is one that CuPy fuses operations on."""
    return not isinstance(x, np.ndarray | np.generic) and x.dtype in TYPES


@cache
def _one_kernel(chain: Callable[..., None], name: str) -> Callable[..., None]:
    return sys.modules["cupy"].fuse(kernel_name=name)(chain)


def _elementwise(compute: Callable[..., Array]) -> Callable[..., Array]:
    """From a function of wide arrays and numbers, a kernel of arrays in any storage."""

    def chain(y: Array, *arguments: Any) -> None:
        y[...] = compute(*map(widen, arguments))

    def kernel(x: Array, *others: Any, out: Array | None = None) -> Array:
        y = sys.modules["cupy"].empty(x.shape, x.dtype) if out is None else out
        _one_kernel(chain, compute.__name__)(y, x, *others)
        return y

    return kernel


def _biased(compute: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """From an activation, the kernel of a result z and a bias that is added to it in place."""

    def chain(y: Array, z: Array, bias: Array) -> None:
        z += bias
        y[...] = compute(widen(z))

    def kernel(z: Array, bias: Array) -> Array:
        y = sys.modules["cupy"].empty(z.shape, z.dtype)
        _one_kernel(chain, f"biased_{compute.__name__}")(y, z, bias)
        return y

    return kernel


def _biased_relu(z: Array, bias: Array) -> Array:
    _one_kernel(_relu_in_place, "biased_relu")(z, bias)
    return z


def _relu_in_place(z: Array, bias: Array) -> None:
    z += bias
    z[...] = unwrap(reference.relu)(widen(z))


ACTIVATIONS = (reference.gelu, reference.gelu_tanh, reference.silu)
CHAINS = (
    *ACTIVATIONS,
    reference.relu,
    reference.relu_backward,
    reference.gelu_backward,
    reference.gelu_tanh_backward,
    reference.silu_backward,
    reference.masked,
)
FUSED: dict[str, Callable[..., Array]] = {chain.__name__: _elementwise(unwrap(chain)) for chain in CHAINS}
FUSED |= {f"biased_{activation.__name__}": _biased(unwrap(activation)) for activation in ACTIVATIONS}
FUSED["biased_relu"] = _biased_relu
"""By name: every chain of more than one operation."""
