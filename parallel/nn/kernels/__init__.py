"""Compute kernels of operators, dispatched to the fastest version for the arrays: in C, CUDA, or the reference.

`reference_*` modules define the results. `compiled_kernels` (C) has most of them, for C-contiguous host arrays of
float32 (indices and flags: int64, uint8, bool); `device_kernels` has some for CuPy arrays.
"""

from parallel.nn.kernels import reference_kernels
from parallel.nn.kernels.deferred import number as number
from parallel.nn.kernels.reference_kernels import *  # noqa: F403
from parallel.nn.kernels.storage import *  # noqa: F403
from quant.kernels.dispatch import Kernels

TWINS = (
    *("relu", "relu_backward", "gelu", "gelu_backward", "gelu_tanh", "gelu_tanh_backward", "silu", "silu_backward"),
    *("biased_relu", "biased_gelu", "biased_gelu_tanh", "biased_silu", "masked", "keep", "add", "affine", "sum_rows"),
    *("layer_norm", "layer_norm_backward", "causal_softmax", "softmax_backward"),
    *("visible_softmax", "visible_probabilities", "attention_gradient", "merge_attention"),
    *("softmax", "top_k", "softmax_cross_entropy", "softmax_cross_entropy_backward", "embedding_gradient"),
    *("add_rows", "weighted_rows", "row_products"),
)
"""Kernels that exist compiled or for a device too. The others are those of the reference."""


TABLE = Kernels(compiled="parallel.nn.kernels.compiled_kernels", device="parallel.nn.kernels.device_kernels")

globals().update(
    {
        name: TABLE.fastest(getattr(reference_kernels, name), int(name == "softmax_cross_entropy_backward"))
        for name in TWINS
    }
)
