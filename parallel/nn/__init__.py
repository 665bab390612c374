"""Models as operators with explicit forward and backward passes, on NumPy and CuPy arrays, without MPI."""

from typing import TYPE_CHECKING, Any

from parallel.nn.activation import GELU, ReLU, SiLU
from parallel.nn.attention import CausalAttention, self_attention
from parallel.nn.compose import Recompute, Residual, Sequential
from parallel.nn.conv import AvgPool2d, Conv2d, MaxPool2d
from parallel.nn.dropout import Dropout
from parallel.nn.embedding import Embedding, PositionEmbedding, Unembedding
from parallel.nn.gated import SwiGLU, gated_transformer
from parallel.nn.linear import Flatten, Linear
from parallel.nn.loss import MSE, Loss, SoftmaxCrossEntropy
from parallel.nn.models import build, convnet, mlp, transformer
from parallel.nn.norm import LayerNorm, RMSNorm
from parallel.nn.operator import ArraySpec, Operator, OperatorOutline, Parameter, PassMode, constant, normal

__all__ = [
    "GELU",
    "MSE",
    "ArraySpec",
    "AvgPool2d",
    "CausalAttention",
    "Conv2d",
    "Dropout",
    "Embedding",
    "Flatten",
    "LayerNorm",
    "Linear",
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
    "SwiGLU",
    "Unembedding",
    "build",
    "constant",
    "convnet",
    "gated_transformer",
    "mlp",
    "normal",
    "self_attention",
    "transformer",
]

TORCH_CLASSES = {"Module": "Operator", "CrossEntropyLoss": "SoftmaxCrossEntropy", "MSELoss": "MSE"}
"""Names that stand in `torch.nn` for what has another name, and perhaps another interface, here."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """AttributeError, with the name here of a class of PyTorch."""
        hint = f"; its counterpart is {TORCH_CLASSES[name]}" if name in TORCH_CLASSES else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
