"""Numbers of tokens become vectors, and vectors scores of tokens, by one table if it is wished."""

from __future__ import annotations

from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect, expect_last, expect_range, stored, widened
from parallel.nn.linear import Init
from parallel.nn.operator import Array, Operator, Outline, Parameter, Run, Sink, Spec, normal


class Embedding(Operator):
    """y = the rows of a table that the tokens name.

    Parameters
    ----------
    vocabulary, width : int
    init : callable, optional
        First values of the table, by default normal with deviation 0.02.

    Attributes
    ----------
    weight : Parameter of shape (vocabulary, width)
    """

    def __init__(self, vocabulary: int, width: int, *, init: Init | None = None):
        self.vocabulary, self.width = vocabulary, width
        self.weight = Parameter((vocabulary, width), init or normal(0.02))

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """x: integers, from 0 to below `vocabulary`, of any shape; y has one axis more. Saves x."""
        expect(x.dtype.kind in "iu", self, "an array of integers", x)
        expect_range(self, x, self.vocabulary, "token")
        if x.size and int(x.min()) < 0:
            raise ValueError(f"Embedding {self.name}: token {int(x.min())} is below 0")
        return self.weight.data[x], x

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """Each row of the table gathers the gradients of its tokens. Tokens have none: dx is None."""
        tokens, upper = saved.reshape(-1), dy.reshape(-1, self.width)
        grads(self.weight, lambda out: kernels.embedding_gradient(upper, tokens, out))

    def outline(self, x: Spec) -> Outline:
        """The result is of the type in which the table is stored, float32 until it has values."""
        y = Spec((*x.shape, self.width), self.weight.dtype)
        return Outline(y, x, 0, y.nbytes + widened(y))


class Unembedding(Operator):
    """y = x W^T with the table W of an embedding: scores of all tokens (Press and Wolf, 2017).

    Parameters
    ----------
    embedding : Embedding
        Its weight gathers gradients from both uses.
    """

    def __init__(self, embedding: Embedding):
        self.weight = embedding.weight

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Saves x."""
        vocabulary, width = self.weight.shape
        expect_last(self, x, width)
        y = kernels.matmul(x.reshape(-1, width), self.weight.data.T)
        return y.reshape(*x.shape[:-1], vocabulary), x

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """dx = dy W; dW = dy^T x."""
        vocabulary, width = self.weight.shape
        rows, upper = saved.reshape(-1, width), dy.reshape(-1, vocabulary)
        dx = kernels.matmul(upper, self.weight.data).reshape(saved.shape)
        grads(self.weight, lambda out: kernels.matmul(upper.T, rows, out=out))
        return dx

    def outline(self, x: Spec) -> Outline:
        """As a `Linear` without bias."""
        vocabulary, width = self.weight.shape
        expect_last(self, x, width)
        y, weight = Spec((*x.shape[:-1], vocabulary), x.dtype), Spec(self.weight.shape, x.dtype)
        work = max(widened(x) + stored(y), widened(y) + stored(x)) + widened(weight)
        return Outline(y, x, 2 * elements(x) * vocabulary, work)


class PositionEmbedding(Operator):
    """y = x + a learned vector for each position.

    Parameters
    ----------
    context : int
        The longest sequence.
    width : int
    init : callable, optional
        First values of the table, by default normal with deviation 0.02.

    Attributes
    ----------
    weight : Parameter of shape (context, width)
    """

    def __init__(self, context: int, width: int, *, init: Init | None = None):
        self.context, self.width = context, width
        self.weight = Parameter((context, width), init or normal(0.02))

    def _expect(self, x: Any) -> None:
        fits = len(x.shape) == 3 and x.shape[1] <= self.context and x.shape[2] == self.width
        expect(fits, self, f"an array of shape (batch, at most {self.context}, {self.width})", x)

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Saves nothing."""
        self._expect(x)
        return x + self.weight.data[: x.shape[1]], ()

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """dx is dy; a position's vector gets the sum over the batch, those not used 0."""

        def gradient(out: Array) -> None:
            length = dy.shape[1]
            kernels.sum_rows(dy, out=out[:length])
            out[length:] = 0

        grads(self.weight, gradient)
        return dy

    def outline(self, x: Spec) -> Outline:
        """One addition."""
        self._expect(x)
        return Outline(Spec(x.shape, x.dtype), ())
