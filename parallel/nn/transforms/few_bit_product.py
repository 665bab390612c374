"""Matrix products of operands in few bits with scales per block ("fp8 training"), forward and backward.

Both operands of each of the three products (y, dx, dW) are rounded in blocks along the axis that is summed over, as
block-scaled matrix units do; each product is summed in float32. Weights, sums, norms and optimizer are those of the
training's precision. The rounding is emulated: codes are decoded before the product.

P. Micikevicius et al., "FP8 formats for deep learning" (2022); OCP "Microscaling formats" (2023); DeepSeek-AI,
"DeepSeek-V3 technical report" (2024, section 3.3: one float32 scale for 128 elements).
"""

import math
from typing import Any, NamedTuple

from parallel.nn import kernels
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, PassMode
from parallel.nn.transforms.quantizable_layers import from_matrix, kind_of, to_matrix
from parallel.nn.transforms.wrapper import WrappedOperator
from quant import MXFP8, PerGroup, QuantSpec, grouped, quantize
from quant.types import Array


class ProductFormat(NamedTuple):
    """Specs, with groups, of the operands of matrix products: layer inputs, weights, and gradients of outputs."""

    inputs: QuantSpec
    weights: QuantSpec
    gradients: QuantSpec


E4M3, E5M2 = (grouped(8, 128, "fp32", code=code) for code in ("e4m3", "e5m2"))

PRODUCTS = {"fp8": ProductFormat(E4M3, E4M3, E5M2), "mxfp8": ProductFormat(MXFP8, MXFP8, MXFP8)}
"""Formats of products by name: with more range for gradients, or with a power of two as the scale of 32 elements."""


class FewBitProduct(WrappedOperator):
    """Operator with a matrix product (`Linear`, `Conv2d`, `Unembedding`) whose operands are rounded to a format."""

    def __init__(self, inner: Any, format_: ProductFormat):
        super().__init__(inner)
        kind = kind_of(inner)
        if kind is None or kind.product is None:
            raise ValueError(f"inner: expected an operator with a matrix product, found {type(inner).__name__}")
        self.weight, self.format, self._product, self._transposed = inner.weight, format_, kind.product, kind.transposed

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        w = to_matrix(self.weight.data, self._transposed)
        rows = rounded(self._product.rows(self.inner, x), self.format.inputs, 1)
        y = rows @ rounded(w, self.format.weights, 1).T
        if (bias := getattr(self.inner, "bias", None)) is not None:
            y += kernels.widen(bias.data)
        return self._product.shaped(self.inner, x, kernels.narrow(y, x.dtype)), x

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        form, product = self.format, self._product
        upper, dx = product.output_rows(self.inner, dy), None
        if not getattr(self.inner, "first", False):
            w = to_matrix(self.weight.data, self._transposed)
            d_rows = rounded(upper, form.gradients, 1) @ rounded(w, form.weights, 0)
            dx = product.input_gradient(self.inner, saved.shape, kernels.narrow(d_rows, dy.dtype))

        def gradient(out: Array) -> None:
            rows = rounded(product.rows(self.inner, saved), form.inputs, 0)
            out[...] = from_matrix(rounded(upper, form.gradients, 0).T @ rows, out.shape, self._transposed)

        grads(self.weight, gradient)
        if (bias := getattr(self.inner, "bias", None)) is not None:
            grads(bias, lambda out: kernels.sum_rows(upper, out=out))
        return dx

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline of the inner operator; float32 copies of all operands and their codes are temporaries."""
        inner = self.inner.outline(x)
        rows = inner.flops // (2 * max(math.prod(self.weight.shape), 1))
        outputs, inputs = self.weight.shape[::-1] if self._transposed else self.weight.shape[:1] * 2
        inputs = inputs if self._transposed else math.prod(self.weight.shape) // max(outputs, 1)
        operands = rows * (inputs + outputs) + inputs * outputs
        return inner._replace(work=inner.work + 13 * operands)


def rounded(x: Array, spec: QuantSpec, axis: int) -> Array:
    """Matrix rounded to the codes of a spec with groups along `axis`: float32. Blocks with NaN or infinity are NaN."""
    assert isinstance(spec.granularity, PerGroup)
    along = spec.replace(granularity=PerGroup(spec.granularity.size, axis))
    return quantize(x, along, nonfinite="poison").dequantize()


def with_products(operator: Operator, format_: ProductFormat) -> Operator:
    """The operator with products in this format, or itself if it has no matrix product."""
    kind = kind_of(operator)
    return operator if kind is None or kind.product is None else FewBitProduct(operator, format_)
