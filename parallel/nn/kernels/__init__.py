"""Kernels of operators, each in the fastest form available for its arrays.

`reference_*` modules define the results. `compiled_kernels` (numba) has the same names, for C-contiguous host arrays of
float32 (indices and flags: int64, uint8, bool); `fused` has elementwise chains as single CuPy kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np

from parallel.nn.kernels import fused, philox, reference_kernels
from parallel.nn.kernels.storage import BOOL as BOOL
from parallel.nn.kernels.storage import array_namespace as array_namespace
from parallel.nn.kernels.storage import narrow as narrow
from parallel.nn.kernels.storage import smallest_type as smallest_type
from parallel.nn.kernels.storage import wide as wide
from parallel.nn.kernels.storage import widen as widen

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

COMPILED_TYPES = frozenset(np.dtype(name) for name in ("float32", "int64", "uint8", "bool"))


@cache
def _compiled() -> Mapping[str, Any]:
    """Compiled functions by name; empty without numba."""
    try:
        return vars(import_module("parallel.nn.kernels.compiled_kernels"))
    except ImportError:
        return {}


def _suits(value: Any) -> bool:
    """True if compiled kernels accept this argument."""
    if not hasattr(value, "dtype"):
        return True
    return type(value) is np.ndarray and value.dtype in COMPILED_TYPES and value.flags.c_contiguous


def _fastest(kernel: Kernel) -> Kernel:
    """Dispatcher to the compiled or fused kernel of the same name where the arguments allow it."""
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


matmul = reference_kernels.matmul
affine = _fastest(reference_kernels.affine)
sum_rows = _fastest(reference_kernels.sum_rows)
relu = _fastest(reference_kernels.relu)
relu_backward = _fastest(reference_kernels.relu_backward)
gelu = _fastest(reference_kernels.gelu)
gelu_backward = _fastest(reference_kernels.gelu_backward)
gelu_tanh = _fastest(reference_kernels.gelu_tanh)
gelu_tanh_backward = _fastest(reference_kernels.gelu_tanh_backward)
silu = _fastest(reference_kernels.silu)
silu_backward = _fastest(reference_kernels.silu_backward)
biased_relu = _fastest(reference_kernels.biased_relu)
biased_gelu = _fastest(reference_kernels.biased_gelu)
biased_gelu_tanh = _fastest(reference_kernels.biased_gelu_tanh)
biased_silu = _fastest(reference_kernels.biased_silu)
masked = _fastest(reference_kernels.masked)
layer_norm = _fastest(reference_kernels.layer_norm)
layer_norm_backward = _fastest(reference_kernels.layer_norm_backward)
rms_norm = _fastest(reference_kernels.rms_norm)
rms_norm_backward = _fastest(reference_kernels.rms_norm_backward)
causal_softmax = _fastest(reference_kernels.causal_softmax)
softmax_backward = _fastest(reference_kernels.softmax_backward)
softmax_cross_entropy = _fastest(reference_kernels.softmax_cross_entropy)
softmax_cross_entropy_backward = _fastest(reference_kernels.softmax_cross_entropy_backward)
squared_error = _fastest(reference_kernels.squared_error)
squared_error_backward = _fastest(reference_kernels.squared_error_backward)
embedding_gradient = _fastest(reference_kernels.embedding_gradient)
im2col = _fastest(reference_kernels.im2col)
col2im = _fastest(reference_kernels.col2im)
max_pool = _fastest(reference_kernels.max_pool)
max_pool_backward = _fastest(reference_kernels.max_pool_backward)
avg_pool = _fastest(reference_kernels.avg_pool)
avg_pool_backward = _fastest(reference_kernels.avg_pool_backward)
keep = _fastest(philox.keep)
key_of = philox.key_of
RUN = reference_kernels.RUN
positions = reference_kernels.positions
