"""Layers with quantisable weights, and their weights as matrices."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from parallel.nn import kernels
from parallel.nn.conv import Conv2d
from parallel.nn.embedding import Embedding, PositionEmbedding, Unembedding
from parallel.nn.linear import Linear
from parallel.nn.operator import Operator, Parameter
from quant.types import Array


class MatrixProduct(NamedTuple):
    """Matrix product of an operator: y = x W^T, W of shape (outputs, inputs).

    `rows(operator, x)` are the rows multiplied by W, of shape (m, inputs); `shaped(operator, x, products)` is the
    operator's result from the products of shape (m, outputs), bias included. For the backward pass, `output_rows` is
    dy as a matrix of shape (m, outputs), and ``input_gradient(operator, shape of x, gradient of the rows)`` is dx.
    """

    rows: Callable[[Any, Array], Array]
    shaped: Callable[[Any, Array, Array], Array]
    output_rows: Callable[[Any, Array], Array]
    input_gradient: Callable[[Any, tuple[int, ...], Array], Array]


class LayerKind(NamedTuple):
    """Kind of operator: `transposed` if its parameter is W^T; its matrix product, or None if W is looked up."""

    transposed: bool
    product: MatrixProduct | None


def _last(operator: Operator, x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _as_last(operator: Operator, x: Array, y: Array) -> Array:
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _reshaped(operator: Operator, shape: tuple[int, ...], rows: Array) -> Array:
    return rows.reshape(shape)


def _windows(conv: Conv2d, x: Array) -> Array:
    return kernels.im2col(x, conv.window, conv.stride, conv.padding).T


def _images(conv: Conv2d, x: Array, y: Array) -> Array:
    over = kernels.positions(x.shape, conv.window, conv.stride, conv.padding)
    y = y.reshape(len(x), *over, conv.outputs).transpose(0, 3, 1, 2)
    return kernels.array_namespace(y).ascontiguousarray(y)


def _pixels(conv: Conv2d, dy: Array) -> Array:
    return dy.transpose(0, 2, 3, 1).reshape(-1, conv.outputs)


def _summed_windows(conv: Conv2d, shape: tuple[int, ...], rows: Array) -> Array:
    columns = kernels.array_namespace(rows).ascontiguousarray(rows.T)
    return kernels.col2im(columns, shape, conv.window, conv.stride, conv.padding)


LAST_AXIS = MatrixProduct(_last, _as_last, _last, _reshaped)


KINDS: dict[type[Operator], LayerKind] = {
    Linear: LayerKind(True, LAST_AXIS),
    Conv2d: LayerKind(False, MatrixProduct(_windows, _images, _pixels, _summed_windows)),
    Unembedding: LayerKind(False, LAST_AXIS),
    Embedding: LayerKind(False, None),
    PositionEmbedding: LayerKind(False, None),
}
"""Operators whose parameter `weight` is quantised."""


def kind_of(operator: Operator) -> LayerKind | None:
    """Entry of `KINDS` for an operator's class, or None if it is not quantisable."""
    return next((kind for known, kind in KINDS.items() if isinstance(operator, known)), None)


def to_matrix(weight: Array, transposed: bool) -> Array:
    return weight.T if transposed else weight.reshape(len(weight), -1)


def from_matrix(matrix: Array, shape: tuple[int, ...], transposed: bool) -> Array:
    return matrix.T if transposed else matrix.reshape(shape)


@dataclass
class QuantizableLayer:
    """Quantisable weight and the operators that use it (two if tied); `transposed` if the parameter is W^T."""

    parameter: Parameter
    transposed: bool
    users: list[Operator] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def multiplied(self) -> bool:
        """True if inputs are multiplied by the weight; False if its rows are only looked up."""
        return any(getattr(kind_of(user), "product", None) for user in self.users)

    @property
    def matrix(self) -> np.ndarray:
        """Weight matrix W: float32, shape (outputs, inputs)."""
        return np.ascontiguousarray(to_matrix(self.parameter.data, self.transposed), np.float32)

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.parameter.shape[-1 if self.transposed else 0]
        return rows, self.parameter.size // max(rows, 1)


def layers_of(model: Operator) -> list[QuantizableLayer]:
    """Layers of a model whose weights can be quantised and are not yet, in tree order; parameters must have names."""
    found: dict[int, QuantizableLayer] = {}
    for _, operator in model.walk():
        if isinstance(operator, Operator) and (kind := kind_of(operator)) and isinstance(operator.weight, Parameter):  # type: ignore[attr-defined]
            weight: Parameter = operator.weight  # type: ignore[attr-defined]
            layer = found.setdefault(id(weight), QuantizableLayer(weight, kind.transposed))
            if operator not in layer.users:
                layer.users.append(operator)
    return list(found.values())


def expect_finite(model: Operator) -> None:
    """Raise ValueError that names the first parameter value that is NaN or infinite."""
    for parameter in model.parameters():
        finite = np.isfinite(parameter.data)
        if not finite.all():
            place = [int(i) for i in np.unravel_index(int(finite.argmin()), parameter.shape)]
            raise ValueError(f"{parameter.name}{place} is {float(parameter.data[tuple(place)])}: this model is broken")
