"""Gradient buckets: neighbouring parameters whose gradients are exchanged in one message. Imports no MPI.

A bucket accumulates the gradients of one rank; `parallel.engine.data_parallel.reducers` sums buckets over the ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.nn.flat_params import FlatParams, ParamSpan, Span, shards
from parallel.nn.kernels.storage import array_namespace
from parallel.nn.operator import Parameter
from quant.types import Array

T = TypeVar("T")


class GradBucket:
    """Gradient bucket: a contiguous range of the flat parameter vector, and this rank's gradient of it.

    `number` is the position in the order of exchanges; `places` are neighbours, ascending. `parts` are the parts of all
    ranks, in whole blocks, `counts` their elements, and `own` is this rank's. The gradient is accumulated in `vector`.
    `square` is the sum of squares of what this rank has handed in since it was last set to 0: not finite if a term is
    not, or overflows. On a device it stays there.
    """

    def __init__(self, number: int, places: Sequence[ParamSpan], ranks: int, rank: int):
        self.number, self.places = number, tuple(places)
        self.span = Span(places[0].span.start, places[-1].span.stop)
        self.parts = shards(self.span, ranks)
        self.own = self.parts[rank]
        self.counts = [part.size for part in self.parts]
        self._starts = {id(place.parameter): place.span.start - self.span.start for place in places}
        self._written: set[int] = set()
        self._views: dict[int, Array] = {}  # of `vector` by id(parameter); making one takes CuPy as long as a launch
        self._accepts = False
        self._scratch: Array = ()
        self.vector: Array = None
        self.square: Any = 0.0

    def within(self, span: Span) -> slice:
        return slice(span.start - self.span.start, span.stop - self.span.start)

    def use_scratch(self, scratch: Array) -> None:
        """Set the buffer for second and later gradients of a tensor, until they are added (`PartitionSpec.scratch`).

        A longer tensor with one use, whose gradient comes twice nevertheless, gets temporary memory.
        """
        self._scratch = scratch

    def reset(self, vector: Array) -> None:
        """Accumulate gradients into `vector` from now on. Its old contents are overwritten."""
        if vector is not self.vector:
            self._views.clear()
        self.vector = vector
        self._written.clear()

    def begin_backward(self) -> None:
        self._accepts = True

    def end_backward(self) -> None:
        """Reject further gradients: backward has passed all units that use the bucket's parameters."""
        self._accepts = False

    def accumulate(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        if not self._accepts:
            raise ValueError(
                f"the gradient of {parameter.name} came after the backward had left the units that hold it; expected "
                "gradients of the operator's own parameters"
            )
        view = self._views.get(id(parameter))
        if view is None:
            view = self._views[id(parameter)] = FlatParams.view(self.vector, parameter, self._starts[id(parameter)])
        if id(parameter) not in self._written:
            compute(view)
            self._written.add(id(parameter))
            return
        fits = len(self._scratch) >= parameter.size
        more = FlatParams.view(self._scratch, parameter, 0) if fits else array_namespace(view).empty_like(view)
        compute(more)
        view += more

    def complete(self, gaps: bool = False) -> None:
        """Zero the gradient of tensors that received none and, with `gaps`, the padding. Add to `square`."""
        for place in self.places:
            start = self._starts[id(place.parameter)]
            if id(place.parameter) not in self._written:
                self.vector[start : start + place.span.size] = 0
                self._written.add(id(place.parameter))
            elif gaps:
                self.vector[start + place.size : start + place.span.size] = 0
        self.square = self.square + self.vector @ self.vector


def users_of(buckets: Sequence[GradBucket], plan: PartitionSpec) -> list[tuple[int, ...]]:
    users = ({unit for place in bucket.places for unit in plan.users[id(place.parameter)]} for bucket in buckets)
    return [tuple(sorted(some)) for some in users]


def buckets_of(cut: Iterable[Sequence[ParamSpan]], plan: PartitionSpec) -> list[GradBucket]:
    return [GradBucket(number, places, plan.ranks, plan.rank) for number, places in enumerate(filter(None, cut))]


def of(table: Mapping[int, T], parameter: Parameter) -> T:
    """Look up a parameter in a table keyed by id(parameter). ValueError if absent: no operator holds the parameter."""
    if id(parameter) not in table:
        name = parameter.name or f"a parameter of shape {parameter.shape}"
        raise ValueError(
            f"the gradient of {name}: expected a parameter that the operator holds as an attribute, in a list or tuple"
        )
    return table[id(parameter)]


def own_views(vector: Array, buckets: Sequence[GradBucket]) -> list[tuple[Span, Array]]:
    """(span, view) of this rank's part of each bucket, where `vector` holds these parts one after another."""
    starts = accumulate((bucket.own.size for bucket in buckets), initial=0)
    return [(bucket.own, vector[start : start + bucket.own.size]) for bucket, start in zip(buckets, starts)]
