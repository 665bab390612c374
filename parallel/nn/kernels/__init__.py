"""Compute kernels of operators, dispatched to the fastest version for the arrays: numba, CUDA, or reference.

`reference_*` modules define the results. `compiled_kernels` (numba) has most of them, for C-contiguous host arrays of
float32 (indices and flags: int64, uint8, bool); `device_kernels` has those of CuPy arrays.
"""

from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib import import_module
from typing import Any

import numpy as np

from parallel.nn.kernels import device_kernels, reference_kernels
from parallel.nn.kernels.deferred import number as number
from parallel.nn.kernels.reference_kernels import *  # noqa: F403
from parallel.nn.kernels.storage import *  # noqa: F403

COMPILED_TYPES = frozenset(np.dtype(name) for name in ("float32", "int64", "uint8", "bool"))

TWINS = (
    *("relu", "relu_backward", "gelu", "gelu_backward", "gelu_tanh", "gelu_tanh_backward", "silu", "silu_backward"),
    *("biased_relu", "biased_gelu", "biased_gelu_tanh", "biased_silu", "masked", "keep", "add", "affine", "sum_rows"),
    *("layer_norm", "layer_norm_backward", "causal_softmax", "softmax_backward"),
    *("visible_softmax", "visible_probabilities", "attention_gradient", "merge_attention"),
    *("softmax", "top_k", "softmax_cross_entropy", "softmax_cross_entropy_backward", "embedding_gradient"),
    *("add_rows", "weighted_rows", "row_products"),
)
"""Kernels that exist compiled or for a device too; the others are those of the reference."""


@cache
def _compiled() -> Mapping[str, Any]:
    """Numba-compiled kernels by name; empty without numba."""
    try:
        return vars(import_module("parallel.nn.kernels.compiled_kernels"))
    except ImportError:
        return {}


def _suits(value: Any) -> bool:
    """True if numba-compiled kernels accept this argument: a scalar, or a C-contiguous host array of a right dtype."""
    if not hasattr(value, "dtype"):
        return True
    return type(value) is np.ndarray and value.dtype in COMPILED_TYPES and value.flags.c_contiguous


def _fastest(name: str) -> Callable[..., Any]:
    """Function that calls the compiled or device kernel `name` if the arguments allow it, else the reference kernel."""
    kernel, on_device = getattr(reference_kernels, name), device_kernels.KERNELS.get(name)
    place = int(name == "softmax_cross_entropy_backward")  # of the first array

    @wraps(kernel)
    def call(*arguments: Any, **options: Any) -> Any:
        if on_device is not None and device_kernels.suits(arguments[place]):
            return on_device(*arguments, **options)
        fast = _compiled().get(name)
        if fast is not None and all(map(_suits, arguments)) and all(map(_suits, options.values())):
            return fast(*arguments, **options)
        return kernel(*arguments, **options)

    return call


globals().update({name: _fastest(name) for name in TWINS})
