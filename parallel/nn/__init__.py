"""Models as operators with explicit forward and backward passes, on NumPy and CuPy arrays, without MPI."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from parallel.nn.activation import GELU, ReLU, SiLU
from parallel.nn.attention import CausalAttention, self_attention
from parallel.nn.autograd_function import AutogradFunction
from parallel.nn.batch_norm import BatchNorm
from parallel.nn.compose import Recompute, Residual, Sequential
from parallel.nn.conv import AvgPool2d, Conv2d, MaxPool2d
from parallel.nn.dropout import Dropout
from parallel.nn.embedding import Embedding, PositionEmbedding, Unembedding
from parallel.nn.gated import LlamaOptions, SwiGLU, gated_transformer
from parallel.nn.generation import generate
from parallel.nn.linear import Flatten, Linear
from parallel.nn.loss import L1, MSE, BCEWithLogits, Huber, Loss, SoftmaxCrossEntropy
from parallel.nn.models import build, convnet, mlp, transformer
from parallel.nn.norm import LayerNorm, RMSNorm
from parallel.nn.operator import (
    ArraySpec,
    Operator,
    OperatorOutline,
    Parameter,
    PassMode,
    StateBuffer,
    constant,
    normal,
)
from parallel.nn.target_weights import with_weights
from quant.types import Array

__all__ = [
    "GELU",
    "L1",
    "MSE",
    "ArraySpec",
    "AvgPool2d",
    "BCEWithLogits",
    "BatchNorm",
    "CausalAttention",
    "Conv2d",
    "Dropout",
    "Embedding",
    "Flatten",
    "Huber",
    "LayerNorm",
    "Linear",
    "LlamaOptions",
    "Loss",
    "MaxPool2d",
    "Operator",
    "OperatorOutline",
    "Parameter",
    "PassMode",
    "PositionEmbedding",
    "RMSNorm",
    "ReLU",
    "Recompute",
    "Residual",
    "Sequential",
    "SiLU",
    "SoftmaxCrossEntropy",
    "StateBuffer",
    "SwiGLU",
    "Unembedding",
    "build",
    "constant",
    "convnet",
    "from_autograd",
    "from_torch",
    "gated_transformer",
    "generate",
    "mlp",
    "normal",
    "self_attention",
    "transformer",
    "with_weights",
]


def from_torch(module: Any, *, first: bool = False) -> Operator:
    """Operator of a `torch.nn.Module`: forward under autograd, backward by `torch.autograd.grad`. Needs PyTorch.

    The operator has a copy of the module, and first its values. Parameters and buffers have PyTorch's names after that
    of the operator. Passes get inputs and results as tensors on the same memory. Tuples of arrays are several
    arguments, or results. Tensors that several modules share are shared by their operators too.

    Parameters
    ----------
    module : torch.nn.Module
        On the CPU, with a tensor or a tuple of tensors as its result. Parts in evaluation mode stay in it. Persistent
        buffers are `StateBuffer`: after a step each is the mean of what its micro-batches arrived at.
    first : bool
        True if no operator before it has parameters: the gradient of the input is not computed.

    Raises
    ------
    TypeError, ValueError
        For another object, and for parameters of integers, without a shape, or not on the CPU.

    Notes
    -----
    Random numbers depend on the run's seed, the step, the use of the operator and the samples of the micro-batch. The
    operator cannot be cut along ``tp`` or divided along ``cp``. Forecasts leave out what autograd keeps.
    """
    made: Operator = import_module("parallel.torch").TorchModule(module, first=first)
    return made


def from_autograd(function: Callable[..., Array], /, **weights: Parameter) -> Operator:
    """Operator of a NumPy function, differentiated by the package `autograd`.

    Parameters
    ----------
    function : function of (x, **weights)
        Of arrays of `autograd.numpy`. Tuples of arrays are several arguments, or results. The first axis has the
        samples.
    **weights : Parameter
        By the names of the function's arguments.

    Raises
    ------
    TypeError
        If `function` is no function, or a weight no `Parameter`.
    """
    return AutogradFunction(function, weights)


TORCH_CLASSES = {"Module": "Operator", "CrossEntropyLoss": "SoftmaxCrossEntropy", "MSELoss": "MSE"}
TORCH_CLASSES |= {"L1Loss": "L1", "HuberLoss": "Huber", "BCEWithLogitsLoss": "BCEWithLogits"}
"""Names that stand in `torch.nn` for what has another name, and perhaps another interface, here."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """AttributeError, with the name here of a class of PyTorch."""
        hint = f"; its counterpart is {TORCH_CLASSES[name]}" if name in TORCH_CLASSES else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
