"""The arithmetic that operators are made of, each function in the fastest form there is for its arrays.

`reference` is what the functions do. Where numba is installed, `compiled` has some of them a second time, under the
same names and with the same arguments; these are taken if all arrays of a call are C-contiguous host arrays of float32
(of indices and flags: of int64, uint8 and bool). `fused` likewise has chains of operations on the elements of CuPy
arrays as one kernel each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np

from parallel.nn.kernels import fused, philox, reference
from parallel.nn.kernels.storage import (
    BFLOAT16,
    BOOL,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    array_namespace,
    narrow,
    smallest_type,
    wide,
    widen,
)

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

COMPILED_TYPES = frozenset(np.dtype(name) for name in ("float32", "int64", "uint8", "bool"))


@cache
def _compiled() -> Mapping[str, Any]:
    """Functions of `compiled` by name; none where numba is missing."""
    try:
        return vars(import_module("parallel.nn.kernels.compiled_kernels"))
    except ImportError:
        return {}


def _suits(value: Any) -> bool:
    """Whether compiled kernels take this argument."""
    if not hasattr(value, "dtype"):
        return True
    return type(value) is np.ndarray and value.dtype in COMPILED_TYPES and value.flags.c_contiguous


def _fastest(kernel: Kernel) -> Kernel:
    """The kernel, or where its arguments allow it the compiled or the fused one of the same name."""
    name, on_device = kernel.__name__, fused.FUSED.get(kernel.__name__)

    @wraps(kernel)
    def call(*arguments: Any, **options: Any) -> Any:
        fast = _compiled().get(name)
        if fast is not None and all(map(_suits, arguments)) and all(map(_suits, options.values())):
            return fast(*arguments, **options)
        if on_device is not None and fused.suits(arguments[0]):
            return on_device(*arguments, **options)
        return kernel(*arguments, **options)

    return cast(Kernel, call)


matmul = reference.matmul
affine = _fastest(reference.affine)
sum_rows = _fastest(reference.sum_rows)
relu = _fastest(reference.relu)
relu_backward = _fastest(reference.relu_backward)
gelu = _fastest(reference.gelu)
gelu_backward = _fastest(reference.gelu_backward)
gelu_tanh = _fastest(reference.gelu_tanh)
gelu_tanh_backward = _fastest(reference.gelu_tanh_backward)
silu = _fastest(reference.silu)
silu_backward = _fastest(reference.silu_backward)
biased_relu = _fastest(reference.biased_relu)
biased_gelu = _fastest(reference.biased_gelu)
biased_gelu_tanh = _fastest(reference.biased_gelu_tanh)
biased_silu = _fastest(reference.biased_silu)
masked = _fastest(reference.masked)
layer_norm = _fastest(reference.layer_norm)
layer_norm_backward = _fastest(reference.layer_norm_backward)
rms_norm = _fastest(reference.rms_norm)
rms_norm_backward = _fastest(reference.rms_norm_backward)
causal_softmax = _fastest(reference.causal_softmax)
softmax_backward = _fastest(reference.softmax_backward)
softmax_cross_entropy = _fastest(reference.softmax_cross_entropy)
softmax_cross_entropy_backward = _fastest(reference.softmax_cross_entropy_backward)
squared_error = _fastest(reference.squared_error)
squared_error_backward = _fastest(reference.squared_error_backward)
embedding_gradient = _fastest(reference.embedding_gradient)
im2col = _fastest(reference.im2col)
col2im = _fastest(reference.col2im)
max_pool = _fastest(reference.max_pool)
max_pool_backward = _fastest(reference.max_pool_backward)
avg_pool = _fastest(reference.avg_pool)
avg_pool_backward = _fastest(reference.avg_pool_backward)
keep = _fastest(philox.keep)
key_of = philox.key_of
RUN = reference.RUN
positions = reference.positions

__all__ = [
    "BFLOAT16",
    "BOOL",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "RUN",
    "affine",
    "array_namespace",
    "avg_pool",
    "avg_pool_backward",
    "biased_gelu",
    "biased_gelu_tanh",
    "biased_relu",
    "biased_silu",
    "causal_softmax",
    "col2im",
    "embedding_gradient",
    "gelu",
    "gelu_backward",
    "gelu_tanh",
    "gelu_tanh_backward",
    "im2col",
    "keep",
    "key_of",
    "layer_norm",
    "layer_norm_backward",
    "masked",
    "matmul",
    "max_pool",
    "max_pool_backward",
    "narrow",
    "positions",
    "relu",
    "relu_backward",
    "rms_norm",
    "rms_norm_backward",
    "silu",
    "silu_backward",
    "smallest_type",
    "softmax_backward",
    "softmax_cross_entropy",
    "softmax_cross_entropy_backward",
    "squared_error",
    "squared_error_backward",
    "sum_rows",
    "wide",
    "widen",
]
