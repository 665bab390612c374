"""Copies of models with quantised weights in place of parameters, and with quantised operator inputs."""

from typing import Any, NamedTuple

import numpy as np

from parallel.nn.operator import Operator, PassMode
from parallel.nn.transforms.quantizable_layers import MatrixProduct, from_matrix, kind_of
from parallel.nn.transforms.wrapper import WrappedOperator, rebuilt
from quant import QuantizedArray, QuantSpec, quantize
from quant.ptq.integer_matmul import exact, product
from quant.types import Array


class FewBitWeight(NamedTuple):
    """Quantised matrix W of shape (outputs, inputs), approximately codes / divisor, column by column.

    The divisor (shape (inputs,), or None for ones) may divide the inputs instead.
    """

    codes: QuantizedArray
    divisor: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and divisors."""
        return self.codes.nbytes + (0 if self.divisor is None else self.divisor.nbytes)

    @property
    def matrix(self) -> Array:
        """Decoded matrix: float32, shape (outputs, inputs)."""
        numbers = self.codes.dequantize()
        return numbers if self.divisor is None else numbers / self.divisor


class PackedWeight:
    """Quantised weight with the interface of the parameter that it replaces, not trainable.

    `transposed` is True if the parameter is the transpose of the matrix.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, quantized: FewBitWeight, shape: tuple[int, ...], transposed: bool, name: str):
        self.quantized, self.shape, self.transposed, self.name = quantized, shape, transposed, name

    @property
    def data(self) -> Array:
        """Decoded values, recomputed at each access: only codes stay in memory."""
        return from_matrix(self.quantized.matrix, self.shape, self.transposed)


class RoundedInput(WrappedOperator):
    """Operator with a packed weight and quantised inputs. Multiplies codes where both are integers.

    `parameters` are the inputs' scale and zero point, from an observer. Inputs beyond that range are clipped.
    """

    def __init__(self, inner: Operator, spec: QuantSpec, parameters: dict[str, Any]):
        super().__init__(inner)
        self.spec, self.given = spec, parameters
        self._product = product_of(inner)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Product of quantised inputs and weights. Saves nothing for a backward (inference only)."""
        codes, bias = self.inner.weight.quantized.codes, getattr(self.inner, "bias", None)  # type: ignore[attr-defined]
        q = quantize(inputs_of(self.inner, x), self.spec, **self.given)
        y = product(q, codes) if exact(self.spec, codes.spec) else q.dequantize() @ codes.dequantize().T
        if bias is not None:
            y += bias.data
        return self._product.shaped(self.inner, x, y), ()


def product_of(operator: Operator) -> MatrixProduct:
    kind = kind_of(operator)
    assert kind is not None and kind.product is not None, operator
    return kind.product


def inputs_of(operator: Operator, x: Array) -> Array:
    """Input of an operator as rows of its matrix product, (rows, inputs), divided by the weight's divisor if any."""
    rows = product_of(operator).rows(operator, x)
    weight = operator.weight  # type: ignore[attr-defined]
    divided = isinstance(weight, PackedWeight) and weight.quantized.divisor is not None
    return rows / weight.quantized.divisor if divided else rows


def packed(model: Operator, weights: dict[str, FewBitWeight]) -> Operator:
    """Copy of the model with layer weights replaced by `weights`, by parameter name. Other parameters are shared."""
    replaced: dict[str, PackedWeight] = {}

    def change(operator: Operator) -> Operator:
        weight = getattr(operator, "weight", None)
        if (kind := kind_of(operator)) is not None and weight is not None and weight.name in weights:
            name = weight.name
            replaced.setdefault(name, PackedWeight(weights[name], weight.shape, kind.transposed, name))
            operator.weight = replaced[name]  # type: ignore[attr-defined]
        return operator

    return rebuilt(model, change)


def rounding(model: Operator, spec: QuantSpec, parameters: dict[str, dict[str, Any]]) -> Operator:
    """Copy of the model that quantises the inputs of operators named in `parameters`, with these scales and zeros."""

    def change(operator: Operator) -> Operator:
        given = parameters.get(operator.name)
        return operator if given is None else RoundedInput(operator, spec, given)

    return rebuilt(model, change)


def weights_of(model: Operator) -> dict[str, PackedWeight]:
    found: dict[str, PackedWeight] = {}
    for operator in (model, *(value for _, value in model.walk() if isinstance(value, Operator))):
        inner = operator.inner if isinstance(operator, RoundedInput) else operator
        if isinstance(weight := getattr(inner, "weight", None), PackedWeight):
            found[weight.name] = weight
    return found


def nbytes(model: Operator) -> int:
    """Bytes of all parameters of a model: quantised ones with scales and divisors, others as float32."""
    return 4 * sum(parameter.size for parameter in model.parameters()) + sum(
        weight.quantized.nbytes for weight in weights_of(model).values()
    )
