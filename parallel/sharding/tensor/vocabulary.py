"""Embedding and cross-entropy whose vocabulary is cut over the ranks of a mesh axis."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from parallel.nn import kernels
from parallel.nn.array_checks import as_matrix, elements, expect, expect_range
from parallel.nn.embedding import Embedding
from parallel.nn.kernels.storage import narrow, widen
from parallel.nn.loss import NO_RESULT, SoftmaxCrossEntropy
from parallel.nn.operator import ArraySpec, GradientSink, OperatorOutline, Parameter, PassMode
from parallel.nn.placement import Placement, PlacementError, Shard
from parallel.nn.rewrite import inherit
from parallel.sharding.tensor.exchange import Operands, allgather, allreduce, tree_sum
from quant.types import Array


class EmbeddingShard(Embedding):
    """Rows `start` to `stop` of the table of a token embedding. Other tokens give zeros.

    The sum over all shards is the embedding, exactly: all terms but one are zero.
    """

    def __init__(self, whole: Embedding, weight: Parameter, start: int, stop: int):
        inherit(self, whole)
        self.weight = weight
        self.start, self.stop = start, stop

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        self.expect_tokens(x)
        here = (x >= self.start) & (x < self.stop)
        xp, table = kernels.array_namespace(x), self.weight.data
        if not len(table):
            return xp.zeros((*x.shape, self.width), table.dtype), x
        y = table[xp.where(here, x - self.start, 0)]
        y[~here] = 0
        return y, x

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        tokens, upper = saved.reshape(-1), as_matrix(dy)
        here = (tokens >= self.start) & (tokens < self.stop)
        grads(self.weight, lambda out: kernels.embedding_gradient(upper[here], tokens[here] - self.start, out))

    def outline(self, x: ArraySpec) -> OperatorOutline:
        whole = super().outline(x)
        return whole._replace(work=whole.work + 4 * x.nbytes)


class VocabularyCrossEntropy(SoftmaxCrossEntropy):
    """Cross-entropy of scores whose classes are cut over the ranks. Three allreduces of a value per target.

    The maximum of the scores, the score of the target, and the sum of exponentials are combined over the ranks. The
    backward pass exchanges nothing (Shoeybi et al., 2019, section 3). Scores have shape (..., classes of this rank).

    Parameters
    ----------
    axis : MeshAxis
    units : sequence of int
        Classes of every logical shard. A rank holds as many shards as any other.
    algorithm : str
        Of the sums.
    whole : SoftmaxCrossEntropy, optional
        The user's loss. It has the smoothing: over all classes, of all ranks.
    """

    exchanges = True
    errors: Any = None
    """Notes errors between exchanges (`Operands`)."""

    def __init__(
        self, axis: Any, units: Sequence[int], algorithm: str = "auto", whole: SoftmaxCrossEntropy | None = None
    ):
        self.axis, self.units, self.algorithm = axis, tuple(units), algorithm
        self._whole = whole or SoftmaxCrossEntropy()
        self._refuse_weights()
        each = len(units) // axis.size
        self.lengths = [sum(units[rank * each : (rank + 1) * each]) for rank in range(axis.size)]
        ends, here = list(accumulate(units)), slice(axis.rank * each, (axis.rank + 1) * each)
        start = sum(self.lengths[: axis.rank])
        self._start = start
        self._bounds = [(stop - count - start, stop - start) for stop, count in zip(ends[here], units[here])]

    @property
    def smoothing(self) -> float:  # type: ignore[override]
        return self._whole.smoothing

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        xp, scores = kernels.array_namespace(y), widen(as_matrix(y))
        operand = Operands(self.errors, scores.shape[:1], scores.dtype, xp)
        top = allreduce(self.axis, operand(lambda: self._largest(y, targets, scores)), op=MPI.MAX)
        score = allreduce(self.axis, operand(lambda: self._expected_score(scores, targets)), self.algorithm)
        sums = allreduce(self.axis, operand(lambda: self._sum_of_exponentials(scores, top)), self.algorithm)
        log_sum = xp.log(sums) + top
        losses = xp.where(targets.reshape(-1) < 0, 0, log_sum - score)
        return float(losses.sum(dtype=np.float64)), (y, targets, log_sum)

    def _refuse_weights(self) -> None:
        """Raise PlacementError if targets or classes have weights, perhaps by an attribute that was assigned later."""
        if not self._whole.is_plain:
            raise PlacementError(f"loss: weights need whole scores, and these are cut along {self.axis.name}")

    def _largest(self, y: Array, targets: Array, scores: Array) -> Array:
        """The largest score of this rank's classes. Checks the arguments."""
        self._refuse_weights()
        expect(targets.dtype.kind in "iu", self, "targets that are integers", targets)
        expect(y.shape[:-1] == targets.shape, self, f"targets of shape {y.shape[:-1]}", targets)
        expect(y.shape[-1] == self.lengths[self.axis.rank], self, f"{self.lengths[self.axis.rank]} classes", y)
        expect_range(self, targets, sum(self.units), "target")
        return scores.max(axis=-1, initial=-np.inf)

    def _sum_of_exponentials(self, scores: Array, top: Array) -> Array:
        xp = kernels.array_namespace(scores)
        exponentials = xp.exp(scores - top[:, None])
        sums = [xp.ascontiguousarray(exponentials[:, start:stop]).sum(axis=-1) for start, stop in self._bounds]
        return tree_sum(sums)

    def backward(self, scale: float, saved: Any) -> Array:
        y, targets, log_sum = saved
        xp, flat = kernels.array_namespace(y), targets.reshape(-1)
        gradient = xp.exp(widen(as_matrix(y)) - log_sum[:, None])
        rows, columns = self._here(flat)
        gradient[rows, columns] -= 1 - self.smoothing
        if self.smoothing:
            gradient -= self.smoothing / sum(self.units)
        gradient *= xp.where(flat < 0, 0, scale).astype(gradient.dtype)[:, None]
        return narrow(gradient, y.dtype).reshape(y.shape)

    def whole(self, y: Array) -> Array:
        """The scores of all classes, on every rank: for a measure of them."""
        return allgather(self.axis, y, y.ndim - 1, self.lengths)

    def place(self, axis: str, y: Placement) -> None:
        """Raise PlacementError unless the scores are cut along the axis in this way, or along the batch."""
        expected = Shard(-1, self.units) if axis == self.axis.name else Shard(0)
        if y != expected and not (axis != self.axis.name and y == Shard(1)):
            raise PlacementError(f"{type(self).__name__}: expected {expected} along {axis}, found {y}")

    def outline(self, y: ArraySpec, targets: ArraySpec) -> OperatorOutline:
        log_sum = ArraySpec((elements(targets),), kernels.wide(y.dtype))
        work = (3 * elements(y) + 6 * elements(targets)) * log_sum.dtype.itemsize
        return OperatorOutline(NO_RESULT, (y, targets, log_sum), 0, work)

    def _expected_score(self, scores: Array, targets: Array) -> Array:
        """This rank's term of the scores' mean over the distribution of the target."""
        rows, columns = self._here(targets.reshape(-1))
        terms = []
        for start, stop in self._bounds:
            term = kernels.array_namespace(scores).zeros(len(scores), scores.dtype)
            if self.smoothing:
                term += kernels.array_namespace(scores).ascontiguousarray(scores[:, start:stop]).sum(axis=-1)
                term *= self.smoothing / sum(self.units)
            inside = (columns >= start) & (columns < stop)
            term[rows[inside]] += (1 - self.smoothing) * scores[rows[inside], columns[inside]]
            terms.append(term)
        return tree_sum(terms)

    def _here(self, targets: Array) -> tuple[Array, Array]:
        """Rows whose target is a class of this rank, and its number on this rank."""
        local = targets - self._start
        here = (local >= 0) & (local < self._bounds[-1][1]) & (targets >= 0)
        (rows,) = kernels.array_namespace(targets).nonzero(here)
        return rows, local[rows]
