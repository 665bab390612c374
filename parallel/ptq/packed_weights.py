"""What stands where a parameter stood: a weight in few bits, and inputs that are rounded on their way in."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from parallel.nn.operator import Array, Operator, Run
from parallel.ptq.quantizable_layers import Product, from_matrix, kind_of
from parallel.ptq.model_surgery import Around, rebuilt
from quant import QuantizedArray, QuantSpec, quantize
from quant.ptq.integer_matmul import exact, product


class Few(NamedTuple):
    """A matrix W in few bits: W is about codes / divisor, column by column.

    Attributes
    ----------
    codes : QuantizedArray, shape (outputs, inputs)
    divisor : array of float32, shape (inputs,), or None for ones
        Or, which is the same, inputs are divided by it before they meet the codes.
    """

    codes: QuantizedArray
    divisor: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Codes, scales and divisors."""
        return self.codes.nbytes + (0 if self.divisor is None else self.divisor.nbytes)

    @property
    def matrix(self) -> Array:
        """What it stands for: float32, shape (outputs, inputs)."""
        numbers = self.codes.dequantize()
        return numbers if self.divisor is None else numbers / self.divisor


class Packed:
    """A weight in few bits, which operators use as they would a parameter. It learns nothing, and is none.

    Parameters
    ----------
    few : Few
    shape : tuple of int
        Of the parameter in whose place it is.
    turned : bool
        Whether that is the transpose of the matrix.
    name : str
        That of the parameter.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, few: Few, shape: tuple[int, ...], turned: bool, name: str):
        self.few, self.shape, self.turned, self.name = few, shape, turned, name

    @property
    def data(self) -> Array:
        """The numbers, made anew whenever they are asked for: only codes stay in memory."""
        return from_matrix(self.few.matrix, self.shape, self.turned)

    @property
    def nbytes(self) -> int:
        """Codes, scales and divisors."""
        return self.few.nbytes


class Rounded(Around):
    """An operator with a packed weight whose inputs are in few bits, too: a product of codes where both are integers.

    Parameters
    ----------
    inner : Operator
    spec : QuantSpec
        Of the inputs: one scale for all.
    parameters : dict
        Its scale, and zero point if it has one, as observers give them: what lies beyond is clipped.
    """

    def __init__(self, inner: Operator, spec: QuantSpec, parameters: dict[str, Any]):
        super().__init__(inner)
        self.spec, self.given = spec, parameters
        self._product = product_of(inner)

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Saves nothing: it is not for training."""
        few, bias = self.inner.weight.few, getattr(self.inner, "bias", None)  # type: ignore[attr-defined]
        q = quantize(inputs_of(self.inner, x), self.spec, **self.given)
        if exact(self.spec, few.codes.spec):
            y = product(q, few.codes)
        else:
            y = q.dequantize() @ few.codes.dequantize().T
        if bias is not None:
            y += bias.data
        return self._product.shaped(self.inner, x, y), ()


def product_of(operator: Operator) -> Product:
    """How an operator that multiplies its weights does so."""
    kind = kind_of(operator)
    assert kind is not None and kind.product is not None, operator
    return kind.product


def inputs_of(operator: Operator, x: Array) -> Array:
    """The rows that an operator's weights multiply, divided where they are to be."""
    rows = product_of(operator).rows(operator, x)
    weight = operator.weight  # type: ignore[attr-defined]
    divided = isinstance(weight, Packed) and weight.few.divisor is not None
    return rows / weight.few.divisor if divided else rows


def packed(model: Operator, few: dict[str, Few]) -> Operator:
    """The model with weights of those names in few bits; the model itself stays as it is."""
    made: dict[str, Packed] = {}

    def change(operator: Operator) -> Operator:
        weight = getattr(operator, "weight", None)
        if (kind := kind_of(operator)) is not None and weight is not None and weight.name in few:
            name = weight.name
            made.setdefault(name, Packed(few[name], weight.shape, kind.turned, name))
            operator.weight = made[name]  # type: ignore[attr-defined]
        return operator

    return rebuilt(model, change)


def rounding(model: Operator, spec: QuantSpec, parameters: dict[str, dict[str, Any]]) -> Operator:
    """The model in which inputs of operators of those names are rounded, too."""
    return rebuilt(
        model,
        lambda operator: (
            Rounded(operator, spec, parameters[operator.name]) if operator.name in parameters else operator
        ),
    )


def weights_of(model: Operator) -> dict[str, Packed]:
    """The packed weights of a model by name."""
    found: dict[str, Packed] = {}
    for operator in (model, *(value for _, value in model.walk() if isinstance(value, Operator))):
        inner = operator.inner if isinstance(operator, Rounded) else operator
        if isinstance(weight := getattr(inner, "weight", None), Packed):
            found[weight.name] = weight
    return found


def nbytes(model: Operator) -> int:
    """Bytes of all weights: those in few bits with their scales and divisors, all others as float32."""
    return 4 * sum(parameter.size for parameter in model.parameters()) + sum(
        weight.nbytes for weight in weights_of(model).values()
    )
