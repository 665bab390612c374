"""Operators made of operators: one after another, around, and forgotten until they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from parallel.nn.operator import Array, Operator, Outline, Parameter, Run, Sink, Spec, nbytes_of


class Sequential(Operator):
    """One operator after another. As a model, its items are the *units* in which parameters come and go.

    Parameters
    ----------
    items : iterable of Operator
    """

    def __init__(self, items: Iterable[Operator]):
        self.items = list(items)

    def members(self) -> Iterator[tuple[str, Parameter | Operator]]:
        """The items by number alone."""
        yield from ((str(number), item) for number, item in enumerate(self.items))

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Each item's result is the next one's input; two items may be one pass over memory."""
        saved: list[Any] = []
        while (at := len(saved)) < len(self.items):
            after = self.items[at + 1] if at + 1 < len(self.items) else None
            x, kept = self.items[at].onward(x, run, after)
            saved += kept
        return x, tuple(saved)

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """The same in reverse."""
        for item, kept in zip(reversed(self.items), reversed(saved)):
            dy = item.backward(dy, kept, grads)
        return dy

    def outline(self, x: Spec) -> Outline:
        """Sums; the worst temporary of any item."""
        outlines = []
        for item in self.items:
            outlines.append(item.outline(x))
            x = outlines[-1].y
        saved = tuple(outline.saved for outline in outlines)
        work = max((outline.work for outline in outlines), default=0)
        return Outline(x, saved, sum(outline.flops for outline in outlines), work)


class Residual(Operator):
    """y = x + inner(x)."""

    def __init__(self, inner: Operator):
        self.inner = inner

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Saves what the inner operator saves."""
        y, saved = self.inner.forward(x, run)
        return x + y, saved

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """The gradient goes both ways."""
        return self.inner.backward(dy, saved, grads) + dy

    def outline(self, x: Spec) -> Outline:
        """dy lives on beside what the inner operator takes."""
        inner = self.inner.outline(x)
        return inner._replace(y=Spec(*inner.y), work=inner.work + x.nbytes)


class Recompute(Operator):
    """Saves the input only, and computes the inner operator's forward a second time when backward comes.

    Memory for time: a third more computing for a model whose every block is wrapped (Chen et al., "Training Deep
    Nets with Sublinear Memory Cost", 2016). The second forward gives what the first one gave, bit for bit.
    """

    def __init__(self, inner: Operator):
        self.inner = inner

    def members(self) -> Iterator[tuple[str, Parameter | Operator]]:
        """Those of the inner operator: wrapped or not, parameters have the same names."""
        yield from self.inner.members()

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Keeps x and which pass it was."""
        return self.inner.forward(x, run)[0], (x, run)

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """Forward again, then backward."""
        return self.inner.backward(dy, self.inner.forward(*saved)[1], grads)

    def outline(self, x: Spec) -> Outline:
        """What the inner operator saves is a temporary."""
        inner = self.inner.outline(x)
        return Outline(inner.y, (x,), inner.flops, inner.work + nbytes_of(inner.saved))
