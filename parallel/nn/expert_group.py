"""Experts of a mixture: operators that are applied to one segment of the rows each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import expect
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode
from quant.types import Array


class ExpertGroup(Operator):
    """Experts side by side: expert e maps the e-th segment of the rows (rows, width) to rows of the same width.

    Segments may be empty. An expert is any operator on rows that draws no random numbers.
    """

    def __init__(self, experts: Iterable[Operator]):
        self.experts = list(experts)

    def __len__(self) -> int:
        """Number of experts of the mixture."""
        return len(self.experts)

    def members(self) -> Iterator[tuple[str, Parameter | Operator]]:
        """Yield (number as text, expert), so that parameter names are "3.0.weight" rather than "experts.3.0.weight"."""
        yield from ((str(number), expert) for number, expert in enumerate(self.experts))

    def forward_segments(self, rows: Array, counts: Sequence[int], run: PassMode) -> tuple[Array, Any]:
        """Apply expert e to ``counts[e]`` rows; return (results in the same order, saved values)."""
        pairs = [expert.forward(rows[one], run) for expert, one in zip(self.experts, _segments(counts))]
        for (y, _), count, expert in zip(pairs, counts, self.experts):
            shape = count, rows.shape[1]
            expect(y.shape == shape, expert, f"a result of shape {shape}", y)
        results = kernels.array_namespace(rows).concatenate([rows[:0], *(y for y, _ in pairs)])
        return results, (tuple(counts), *(saved for _, saved in pairs))

    def backward_segments(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        """Gradient of the rows; every expert passes its parameters' gradients on, also those without rows."""
        counts, *values = saved
        parts = [
            expert.backward(dy[one], own, grads) for expert, own, one in zip(self.experts, values, _segments(counts))
        ]
        return kernels.array_namespace(dy).concatenate([dy[:0], *parts])

    def outline_rows(self, x: ArraySpec) -> OperatorOutline:
        """Outline for rows like `x` in all segments together, if saved values are in proportion to the rows."""
        outline = self.experts[0].outline(x)
        return outline._replace(y=ArraySpec(*x), work=outline.work + 2 * x.nbytes)


def _segments(counts: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
