"""Operators applied to the parts of a sequence one by one, so that their bits do not depend on the number of ranks.

The parts (`SequenceDivision.parts`) are the same for every number of ranks, and so are the shapes of all products. The
gradients of a parameter from all parts of a rank are added along a binary tree. A rank has a whole subtree of it. The
reproducible sum over ranks and micro-batches (`parallel.runtime.tree_sum`) continues from that sum. If several stages
of a pipeline share a table (`Parameter.terms`), each part's gradient is handed in separately, because the uses are
summed first.

Ranks along another axis may have equal shares of the rank's tokens, one after another. Then parts consist of slices,
and a rank has neighbouring ones: `SequenceParts.each` of them are summed first, then the parts, then the shares.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import label
from parallel.nn.compose import Wrapper
from parallel.nn.dropout import Dropout
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode, sum_flops
from parallel.nn.placement import Placement, PlacementError
from parallel.nn.rewrite import operators_in
from parallel.nn.router import Router
from parallel.nn.trial_outline import loss_outline
from parallel.runtime.tree_sum import TreeNode, TreeSum, VectorPool
from quant.types import Array


class TiedTerms:
    """Gradients by part of parameters with several uses (tied tables), until their last use in a backward pass.

    The sum over the uses comes first, then the sum over the parts, as if each part were a micro-batch. A pass is
    identified by its `PassMode`. Gradients of a failed pass are dropped with it.
    """

    def __init__(self) -> None:
        self._passes: dict[int, tuple[weakref.ref[PassMode], dict[int, list[list[Array]]]]] = {}

    def add(self, run: PassMode, parameter: Parameter, terms: list[Array]) -> list[Array] | None:
        """Add the gradients by part of one use. After the last use return their sums over the uses, before it None."""
        key = id(run)
        if key not in self._passes:
            self._passes[key] = weakref.ref(run, lambda _: self._passes.pop(key, None)), {}
        of_pass = self._passes[key][1]
        uses = of_pass.setdefault(id(parameter), [])
        uses.append(terms)
        if len(uses) < parameter.uses:
            return None
        first, *others = of_pass.pop(id(parameter))
        for other in others:
            for total, term in zip(first, other):
                total += term
        return first


class LossByParts:
    """A loss applied to each of this rank's parts of the sequence. Its forward pass returns the loss of each part.

    So sums of losses have the same bits on any number of ranks.
    """

    def __init__(self, inner: Any, places: Sequence[slice]):
        self.inner, self.places = inner, tuple(places)

    def __getattr__(self, name: str) -> Any:
        """Delegate methods that count or measure targets to the inner loss."""
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def forward(self, y: Array, targets: Array) -> tuple[tuple[float, ...], Any]:
        pairs = [self.inner.forward(y[:, place].copy(), targets[:, place].copy()) for place in self.places]
        return tuple(loss for loss, _ in pairs), tuple(saved for _, saved in pairs)

    def backward(self, scale: float, saved: Any) -> Array:
        parts = [self.inner.backward(scale, values) for values in saved]
        return kernels.array_namespace(parts[0]).concatenate(parts, axis=1)

    def outline(self, y: ArraySpec, targets: ArraySpec) -> OperatorOutline:
        """Outline of all parts, whose scores are arrays of their own."""
        outlines = []
        for place in self.places:
            specs = (ArraySpec((x.shape[0], place.stop - place.start, *x.shape[2:]), x.dtype) for x in (y, targets))
            outlines.append(loss_outline(self.inner, *specs))
        work = max(outline.work for outline in outlines) + y.nbytes
        return OperatorOutline(outlines[0].y, tuple(outline.saved for outline in outlines), 0, work)


class SequenceParts(Wrapper):
    """An operator without exchanges, applied to each of this rank's parts of the sequence.

    Parameters
    ----------
    inner : Operator
        Of inputs of shape (batch, positions, ...). Positions must not depend on each other.
    places : sequence of slice
        Positions of each part in the arrays of all tokens of this rank.
    tied : TiedTerms or None
        Of the whole model. None: uses of a parameter are summed by themselves.
    """

    each = 1
    """Slices of a part to which the operator is applied one by one."""

    def __init__(self, inner: Operator, places: Sequence[slice], tied: TiedTerms | None):
        super().__init__(inner)
        self.places, self.tied, self.mixes = tuple(places), tied, inner.mixes

    def slices(self, length: int) -> Sequence[slice]:
        """Positions of the slices in arrays of this length.

        The arrays have all tokens of this rank, or its share along another axis.
        """
        shares = self.places[-1].stop // length if length else 1
        return [slice(place.start // shares, place.stop // shares) for place in self.places]

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        pairs = [self.inner.forward(part, run) for part in self._split(x)]
        return self._joined([y for y, _ in pairs]), (run, *(saved for _, saved in pairs))

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        found: dict[int, tuple[Parameter, list[Callable[[Array], object]]]] = {}

        def collect(parameter: Parameter, compute: Callable[[Array], object]) -> None:
            found.setdefault(id(parameter), (parameter, []))[1].append(compute)

        run, *by_part = saved
        dx = [self.inner.backward(part, values, collect) for part, values in zip(self._split(dy), by_part)]
        for parameter, computes in found.values():
            apart = parameter.terms > 1
            for compute in computes if apart else [self._summed(run, parameter, computes)]:
                grads(parameter, compute)
        return None if dx[0] is None else self._joined(dx)

    def _summed(
        self, run: PassMode, parameter: Parameter, computes: Sequence[Callable[[Array], object]]
    ) -> Callable[[Array], object]:
        """Function that writes the sum of gradients by the tree over the slices of each part, then over parts.

        With `tied` uses it writes 0 in all but the last.
        """

        def compute(out: Array) -> None:
            xp = kernels.array_namespace(out)
            terms: Any = (self._term(one, xp.empty(out.shape, out.dtype)) for one in computes)
            if parameter.uses > 1 and self.tied is not None:
                terms = self.tied.add(run, parameter, list(terms))
            if terms is None:
                out[...] = 0
                return
            slices, parts = iter(terms), range(len(computes) // self.each)
            out[...] = _tree_total(_tree_total(islice(slices, self.each)) for _ in parts)

        return compute

    @staticmethod
    def _term(compute: Callable[[Array], object], out: Array) -> Array:
        compute(out)
        return out

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        return self.inner.place(axis, x, partial)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline of all slices. Each slice has its own arrays."""
        places = self.slices(x.shape[1])
        parts = [ArraySpec((x.shape[0], place.stop - place.start, *x.shape[2:]), x.dtype) for place in places]
        outlines = [self.inner.outline(part) for part in parts]
        y = outlines[0].y
        whole = ArraySpec((y.shape[0], x.shape[1], *y.shape[2:]), y.dtype)
        gradients = sum(4 * parameter.size for parameter in self.inner.parameters()) * len(parts)
        work = max(outline.work for outline in outlines) + x.nbytes + 2 * whole.nbytes + gradients
        saved = tuple(outline.saved for outline in outlines)
        return OperatorOutline(whole, saved, work=work, **sum_flops(outlines))

    def _split(self, x: Array) -> list[Array]:
        return [x[:, place].copy() for place in self.slices(x.shape[1])]

    @staticmethod
    def _joined(parts: Sequence[Array]) -> Array:
        return kernels.array_namespace(parts[0]).concatenate(parts, axis=1)


def works_by_part(operator: Operator) -> bool:
    """Test if an operator may be applied to parts of a sequence, by its `mixes`.

    PlacementError if an operator in it has random numbers: they would be the same for all parts.
    """
    if type(operator).place is not Operator.place or operator.mixes is None:
        return False
    for one in operators_in(operator):
        if isinstance(one, Dropout | Router):
            expected = "one without an operator whose random numbers depend on the position"
            raise PlacementError(f"{label(operator)}: expected {expected} to apply part by part, found {label(one)}")
    return True


def _tree_total(terms: Iterable[Array]) -> Array:
    """Sum of arrays by the binary tree of neighbours. Overwrites the arrays."""
    tree = TreeSum(VectorPool(list))  # nothing is taken from the pool
    for number, term in enumerate(terms):
        tree.push(TreeNode(0, number), term, ours=True)
    return tree.total()
