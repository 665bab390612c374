"""Experts of a mixture, and the tokens that are given to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import expect
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode
from quant.types import Array


class Assignments(NamedTuple):
    """Tokens given to experts, ordered by expert and then by token.

    Attributes
    ----------
    tokens : array of int64
        Row of each token.
    counts : list of int
        Tokens of each expert.
    weights : array of shape (assignments, 1), wide
    """

    tokens: Array
    counts: list[int]
    weights: Array

    @classmethod
    def from_weights(cls, weights: Array) -> Assignments:
        """Assignments of the weights (tokens, experts) that are not 0."""
        xp = kernels.array_namespace(weights)
        by_expert = xp.ascontiguousarray(weights.T)
        found = xp.flatnonzero(by_expert)
        counts = [int(count) for count in (by_expert != 0).sum(axis=1)]
        return cls(found % len(weights), counts, by_expert.reshape(-1)[found][:, None])

    @property
    def places(self) -> list[slice]:
        """Assignments of each expert."""
        return [slice(start, stop) for start, stop in pairwise(accumulate(self.counts, initial=0))]

    def add(self, y: Array, rows: Sequence[Array], weighted: bool = True) -> None:
        """Add the rows of each expert, perhaps times weights, to those of their tokens in y, wide, expert by expert."""
        for place, some in zip(self.places, rows):
            weights = self.weights[place] if weighted else None
            kernels.add_rows(y, self.tokens[place], kernels.widen(some), weights)

    def gradients(self, upper: Array, results: Sequence[Array], out: Sequence[Array]) -> Array:
        """Write gradients of each expert's results, by those of y, wide, to `out`; return those of the weights.

        `add` has added the results to y.
        """
        dweights = kernels.array_namespace(upper).empty(len(self.tokens), upper.dtype)
        for place, result, rows in zip(self.places, results, out):
            wide = rows if rows.dtype == upper.dtype else kernels.widen(rows)
            about = self.tokens[place], self.weights[place], kernels.widen(result)
            dweights[place] = kernels.weighted_rows(upper, *about, wide)
            kernels.narrow(wide, rows.dtype, rows)
        return dweights

    def of_experts(self, start: int, stop: int) -> Assignments:
        """Assignments to the experts from `start` to `stop`, numbered from 0."""
        first = sum(self.counts[:start])
        here = slice(first, first + sum(self.counts[start:stop]))
        return Assignments(self.tokens[here], self.counts[start:stop], self.weights[here])

    def subset(self, places: np.ndarray) -> Assignments:
        """Assignments at `places`, which ascend."""
        index = kernels.array_namespace(self.weights).asarray(places)
        counts = np.bincount(self.experts[places], minlength=len(self.counts))
        return Assignments(self.tokens[index], counts.tolist(), self.weights[index])

    @property
    def experts(self) -> np.ndarray:
        """Expert of each assignment."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


class ExpertGroup(Operator):
    """Experts side by side: expert e maps the e-th segment of the rows (rows, width) to rows of the same width.

    Segments may be empty. An expert is any operator on rows that draws no random numbers. A pass has two calls, so that
    groups on several ranks compute something else while tokens travel: `send`, then `forward_sent`; `send_gradients`,
    then `backward_sent`.

    Parameters
    ----------
    experts : iterable of Operator
    first : int
        Number of the first of them in the mixture, for names.
    """

    chooses_tokens = continues = True
    errors: Any = None
    """Notes errors of this rank's experts, in place of which zeros go on their way (its method `add`); None: raise."""

    def __init__(self, experts: Iterable[Operator], first: int = 0):
        self.experts, self.first = list(experts), first

    def __len__(self) -> int:
        """Number of experts, on all ranks."""
        return len(self.experts)

    def members(self) -> Iterator[tuple[str, Parameter | Operator]]:
        """Yield (number as text, expert), so that parameter names are "3.0.weight" rather than "experts.3.0.weight"."""
        yield from ((str(number), expert) for number, expert in enumerate(self.experts, self.first))

    def forward_rows(self, number: int, rows: Array, run: PassMode) -> tuple[Array, Any]:
        """Apply the expert of this number here to rows; return (result, saved values)."""
        y, saved = self.experts[number].forward(rows, run)
        return self._like(rows, y, self.experts[number]), saved

    def _like(self, x: Array, y: Array, expert: Operator) -> Array:
        """The result, or gradient, y of an expert, which must have the shape of x."""
        try:
            expect(y.shape == x.shape, expert, f"a result of shape {x.shape}", y)
        except ValueError as error:
            if self.errors is None:
                raise
            self.errors.add(error)
            return kernels.array_namespace(x).zeros_like(x)
        return y

    def backward_rows(self, number: int, dy: Array, saved: Any, grads: GradientSink) -> Array:
        """Gradient of the rows of an expert, which passes its parameters' gradients on, also without rows."""
        return self._like(dy, self.experts[number].backward(dy, saved, grads), self.experts[number])

    def send(self, tokens: Array, chosen: Assignments) -> Any:
        """Send tokens (tokens, width) to their experts; returns what `forward_sent` takes."""
        return chosen, [tokens[chosen.tokens[place]] for place in chosen.places]

    def forward_sent(self, sent: Any, y: Array, run: PassMode) -> Any:
        """Add the experts' weighted results, expert by expert, to the tokens' rows y, wide; returns saved values."""
        chosen, rows = sent
        pairs = [self.forward_rows(number, some, run) for number, some in enumerate(rows)]
        results = [y for y, _ in pairs]
        chosen.add(y, results)
        return chosen, results, [saved for _, saved in pairs]

    def send_gradients(self, upper: Array, saved: Any, dtype: np.dtype) -> Any:
        """Send gradients of y, wide, to the experts, in their dtype; returns what `backward_sent` takes."""
        chosen, results, _ = saved
        rows = [kernels.array_namespace(upper).empty(result.shape, dtype) for result in results]
        return rows, chosen.gradients(upper, results, rows)

    def backward_sent(self, sent: Any, saved: Any, dx: Array, grads: GradientSink) -> Array:
        """Add the gradients of the tokens to dx, wide; returns those of the weights of the assignments."""
        (dresults, dweights), (chosen, _, of_experts) = sent, saved
        last_first = reversed(range(len(self.experts)))  # whose saved values are in the caches
        found = [self.backward_rows(number, dresults[number], of_experts[number], grads) for number in last_first]
        chosen.add(dx, found[::-1], weighted=False)
        return dweights

    def outline_rows(self, x: ArraySpec) -> OperatorOutline:
        """Outline for rows like `x` in all segments together, if saved values are in proportion to the rows."""
        outline = self.experts[0].outline(x)
        return outline._replace(y=ArraySpec(*x), work=outline.work + 2 * x.nbytes)
