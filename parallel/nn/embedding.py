"""Token and position embeddings, and the output projection tied to the token embedding."""

from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import (
    as_matrix,
    elements,
    expect,
    expect_last,
    expect_range,
    stored,
    whole_number,
    widened,
)
from parallel.nn.operator import ArraySpec, GradientSink, Init, Operator, OperatorOutline, Parameter, PassMode, normal
from quant.types import Array


class Embedding(Operator):
    """Token embedding: rows of a trainable table, selected by token ids.

    `weight`, of shape (vocabulary, width), starts with `init`, by default normal with deviation 0.02.
    """

    mixes = ()
    fixed = ("vocabulary", "width")

    def __init__(self, vocabulary: int, width: int, *, init: Init | None = None):
        self.vocabulary, self.width = whole_number("vocabulary", vocabulary), whole_number("width", width)
        self.weight = Parameter((vocabulary, width), init or normal(0.02))

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Look up token ids x, integers in [0, vocabulary) of any shape; y has shape (*x.shape, width)."""
        self.expect_tokens(x)
        return self.weight.data[x], x

    def expect_tokens(self, x: Array) -> None:
        """Raise ValueError unless x has integers in [0, vocabulary)."""
        expect(x.dtype.kind in "iu", self, "an array of integers", x)
        expect_range(self, x, self.vocabulary, "token", least=0)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        """Pass the table's gradient (sum of dy per token id) to `grads`; return None, as token ids have no gradient."""
        tokens, upper = saved.reshape(-1), dy.reshape(-1, self.width)
        grads(self.weight, lambda out: kernels.embedding_gradient(upper, tokens, out))

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline; the result has the dtype of the table's parameter."""
        y = ArraySpec((*x.shape, self.width), self.weight.dtype)
        return OperatorOutline(y, x, 0, y.nbytes + widened(y))


class Unembedding(Operator):
    """Tied output projection to token scores, y = x W^T, with the table W of `embedding` (Press and Wolf, 2017)."""

    mixes = (-1,)

    def __init__(self, embedding: Embedding):
        self.weight = embedding.weight

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        vocabulary, width = self.weight.shape
        expect_last(self, x, width)
        y = kernels.matmul(x.reshape(-1, width), self.weight.data.T)
        return y.reshape(*x.shape[:-1], vocabulary), x

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        rows, upper = as_matrix(saved), as_matrix(dy)
        dx = kernels.matmul(upper, self.weight.data).reshape(saved.shape)
        grads(self.weight, lambda out: kernels.matmul(upper.T, rows, out=out))
        return dx

    def outline(self, x: ArraySpec) -> OperatorOutline:
        vocabulary, width = self.weight.shape
        expect_last(self, x, width)
        y, weight = ArraySpec((*x.shape[:-1], vocabulary), x.dtype), ArraySpec(self.weight.shape, x.dtype)
        work = max(widened(x) + stored(y), widened(y) + stored(x)) + widened(weight)
        return OperatorOutline(y, x, 2 * elements(x) * vocabulary, work)


class PositionEmbedding(Operator):
    """Learned position embedding: y = x + weight[position], for sequences of up to `context` positions.

    `weight`, of shape (context, width), starts with `init`, by default normal with deviation 0.02.
    """

    fixed = ("context", "width")
    continues = True

    def __init__(self, context: int, width: int, *, init: Init | None = None):
        self.context, self.width = whole_number("context", context), whole_number("width", width)
        self.weight = Parameter((context, width), init or normal(0.02))

    def _expect(self, x: Any) -> None:
        fits = len(x.shape) == 3 and x.shape[1] <= self.context and x.shape[2] == self.width
        expect(fits, self, f"an array of shape (batch, at most {self.context}, {self.width})", x)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        self._expect(x)
        first = 0 if run.past is None else run.past.length
        expect(first + x.shape[1] <= self.context, self, f"at most {self.context} positions, {first} before", x)
        return x + self.weight.data[first : first + x.shape[1]], ()

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        """Return dy as dx; the table's gradient is the sum of dy over the batch, 0 for unused positions."""

        def gradient(out: Array) -> None:
            length = dy.shape[1]
            kernels.sum_rows(dy, out=out[:length])
            out[length:] = 0

        grads(self.weight, gradient)
        return dy

    def outline(self, x: ArraySpec) -> OperatorOutline:
        self._expect(x)
        return OperatorOutline(ArraySpec(x.shape, x.dtype), ())
