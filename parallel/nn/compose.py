"""Operators built of operators: sequence, residual connection, wrapper, recomputation."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import label
from parallel.nn.operator import (
    ArraySpec,
    GradientSink,
    Member,
    Operator,
    OperatorOutline,
    Parameter,
    PassMode,
    nbytes_of,
    sum_flops,
)
from parallel.nn.placement import Placement
from quant.types import Array


class Sequential(Operator):
    """Operators applied in order. Of a whole model, the items are the *units* whose weights are gathered and freed.

    They are arguments, as in PyTorch, or one iterable; TypeError if one is no operator. `cuts`, the styles in which
    `parallel.sharding.tensor` cuts operators by names or patterns of names, is for whole models.
    """

    fixed = ("cuts",)
    continues = True

    def __init__(self, *items: Operator | Iterable[Operator], cuts: Mapping[str, str] | None = None):
        given: Any = items[0] if len(items) == 1 and isinstance(items[0], Iterable) else items
        self.items: list[Operator] = list(given)
        self.cuts = dict(cuts or {})
        for number, item in enumerate(self.items):
            if not isinstance(item, Operator):
                raise TypeError(f"Sequential: expected operators, found {item!r} as item {number}")

    def members(self) -> Iterator[tuple[str, Member]]:
        """Yield (number as text, item), so that parameter names are "3.weight" rather than "items.3.weight"."""
        yield from ((str(number), item) for number, item in enumerate(self.items))

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Apply the items in order, some fused with the next (`onward`); saved values are a tuple, one per item."""
        saved: list[Any] = []
        while (at := len(saved)) < len(self.items):
            after = self.items[at + 1] if at + 1 < len(self.items) else None
            x, values = self.items[at].onward(x, run, after)
            saved += values
        return x, tuple(saved)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        for at in reversed(range(len(self.items))):
            dy = self.items[at].backward(dy, saved[at], grads)
            if dy is None and any(one.requires_grad for item in self.items[:at] for one in item.parameters()):
                raise TypeError(
                    f"{label(self.items[at])}: expected backward to return the input's gradient, found None"
                )
        return dy

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        for item in self.items:
            x = item.place(axis, x, partial)
        return x

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline of all items: saved arrays of all, sum of flops, largest temporaries of any item."""
        outlines = []
        for item in self.items:
            outlines.append(item.outline(x))
            x = outlines[-1].y
        saved = tuple(outline.saved for outline in outlines)
        work = max((outline.work for outline in outlines), default=0)
        return OperatorOutline(x, saved, work=work, **sum_flops(outlines))


class Residual(Operator):
    """Residual (skip) connection, y = x + inner(x)."""

    continues = True

    def __init__(self, inner: Operator):
        self.inner = inner

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        y, saved = self.inner.forward(x, run)
        return kernels.add(x, y), saved

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return kernels.add(self.inner.backward(dy, saved, grads), dy)

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        """Placement of x, which the inner operator's result must share."""
        y = self.inner.place(axis, x, partial)
        if y != x:
            raise self.refuse(axis, y, f"a sum of {x} and the like")
        return x

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline of the inner operator, plus temporary memory for dy, which stays allocated in its backward pass."""
        inner = self.inner.outline(x)
        return inner._replace(y=ArraySpec(*inner.y), work=inner.work + x.nbytes)


class Wrapper(Operator):
    """Base class of operators around one other, whose name and members they have: names are as without the wrapper."""

    continues = True

    def __init__(self, inner: Operator):
        self.inner = inner

    @property
    def name(self) -> str:
        """Name of the inner operator, by which that has its random numbers and records."""
        return self.inner.name

    @name.setter
    def name(self, name: str) -> None:
        self.inner.name = name

    def members(self) -> Iterator[tuple[str, Member]]:
        yield from self.inner.members()


class Recompute(Wrapper):
    """Activation recomputation: saves the input only and runs the inner forward pass again in the backward pass."""

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        began = run.position()
        return self.inner.forward(x, run)[0], (x, run, began)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        x, run, began = saved
        with run.repeated(began):
            values = self.inner.forward(x, run)[1]
        return self.inner.backward(dy, values, grads)

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        return self.inner.place(axis, x, partial)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline in which only x is saved; arrays saved by the inner operator count as temporaries."""
        inner = self.inner.outline(x)
        work, recomputed = inner.work + nbytes_of(inner.saved), inner.flops + inner.recomputed
        return inner._replace(saved=(x,), work=work, recomputed=recomputed)
