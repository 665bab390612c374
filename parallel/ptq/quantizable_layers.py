"""Which operators have weights to be written in few bits, and how each is a matrix that multiplies rows of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from parallel.nn import kernels
from parallel.nn.conv import Conv2d
from parallel.nn.embedding import Embedding, PositionEmbedding, Unembedding
from parallel.nn.linear import Linear
from parallel.nn.operator import Array, Operator, Parameter


class Product(NamedTuple):
    """How an operator multiplies its weights: y = x W^T, W of shape (outputs, inputs).

    Attributes
    ----------
    rows : callable (operator, x) -> array, shape (m, inputs)
        What W multiplies.
    shaped : callable (operator, x, products) -> y
        The result, from the products of shape (m, outputs) with the bias in them.
    """

    rows: Callable[[Any, Array], Array]
    shaped: Callable[[Any, Array, Array], Array]


class Kind(NamedTuple):
    """A line of the table.

    Attributes
    ----------
    turned : bool
        Whether the parameter is W^T.
    product : Product or None
        None where weights are looked up and nothing is multiplied.
    """

    turned: bool
    product: Product | None


def _last(operator: Operator, x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _as_last(operator: Operator, x: Array, y: Array) -> Array:
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _windows(conv: Conv2d, x: Array) -> Array:
    return kernels.im2col(x, conv.window, conv.stride, conv.padding).T


def _images(conv: Conv2d, x: Array, y: Array) -> Array:
    over = (kernels.positions(n, size, conv.stride, conv.padding) for n, size in zip(x.shape[2:], conv.window))
    return np.ascontiguousarray(y.reshape(len(x), *over, conv.outputs).transpose(0, 3, 1, 2))


KINDS: dict[type[Operator], Kind] = {
    Linear: Kind(True, Product(_last, _as_last)),
    Conv2d: Kind(False, Product(_windows, _images)),
    Unembedding: Kind(False, Product(_last, _as_last)),
    Embedding: Kind(False, None),
    PositionEmbedding: Kind(False, None),
}
"""Operators whose parameter `weight` is quantised; all other parameters stay as they are."""


def kind_of(operator: Operator) -> Kind | None:
    """Its line in the table, if it has one."""
    return next((kind for known, kind in KINDS.items() if isinstance(operator, known)), None)


def to_matrix(weight: Array, turned: bool) -> Array:
    """A parameter's values as W."""
    return weight.T if turned else weight.reshape(len(weight), -1)


def from_matrix(matrix: Array, shape: tuple[int, ...], turned: bool) -> Array:
    """W as a parameter's values."""
    return matrix.T if turned else matrix.reshape(shape)


@dataclass
class Layer:
    """A weight, and the operators that use it: two, where scores are made by the embedding's own table.

    Attributes
    ----------
    parameter : Parameter
    turned : bool
        Whether it is W^T.
    users : list of Operator
    """

    parameter: Parameter
    turned: bool
    users: list[Operator] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The parameter's."""
        return self.parameter.name

    @property
    def multiplied(self) -> bool:
        """Whether rows of inputs come to it, or it is only looked up."""
        return any(getattr(kind_of(user), "product", None) for user in self.users)

    @property
    def matrix(self) -> np.ndarray:
        """W: float32, shape (outputs, inputs)."""
        return np.ascontiguousarray(to_matrix(self.parameter.data, self.turned), np.float32)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        rows = self.parameter.shape[-1 if self.turned else 0]
        return rows, self.parameter.size // max(rows, 1)


def layers_of(model: Operator) -> list[Layer]:
    """The weights of a model whose parameters have names, in order of their first use."""
    found: dict[int, Layer] = {}
    for _, operator in model.walk():
        if isinstance(operator, Operator) and (kind := kind_of(operator)) and isinstance(operator.weight, Parameter):  # type: ignore[attr-defined]
            weight: Parameter = operator.weight  # type: ignore[attr-defined]
            layer = found.setdefault(id(weight), Layer(weight, kind.turned))
            if operator not in layer.users:
                layer.users.append(operator)
    return list(found.values())


def expect_finite(model: Operator) -> None:
    """Raise ValueError that names the parameter and the place if any value of a model is NaN or infinite."""
    for parameter in model.parameters():
        finite = np.isfinite(parameter.data)
        if not finite.all():
            place = [int(i) for i in np.unravel_index(int(finite.argmin()), parameter.shape)]
            raise ValueError(f"{parameter.name}{place} is {float(parameter.data[tuple(place)])}: this model is broken")
