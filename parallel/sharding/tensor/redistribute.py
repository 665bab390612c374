"""Operators that change the placement of a value along a mesh axis. Forward and backward exchange mirror each other.

Megatron-LM's f stands before operators that are cut, g after them (Shoeybi et al., 2019, section 3)::

    x --f--> [ x W_1 ] --> y_1 --> [ y_1 V_1 ] --g--> sum_j y_j V_j      rank 1
    x --f--> [ x W_2 ] --> y_2 --> [ y_2 V_2 ] --g--> sum_j y_j V_j      rank 2

    operator          forward          backward         from                      to
    CopyToShards (f)  nothing          allreduce        Replicate()               Replicate(partial=True)
    SumShards (g)     allreduce        nothing          Partial()                 Replicate()
    GatherSequence    allgather        reduce-scatter   Shard(1)                  Replicate(partial=True)
    ScatterSequence   reduce-scatter   allgather        Partial()                 Shard(1)

The last two take their place if activations between cut operators are sharded along the sequence (Korthikanti et al.,
2022, section 4.2.2). The volume is the same. Terms of sums are float32 or float64, and sums are rounded once, to the
storage dtype.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from parallel.nn.kernels.storage import narrow
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode
from parallel.nn.placement import Partial, Placement, PlacementError, Replicate, Shard
from parallel.sharding.tensor.exchange import allgather, allreduce, reduce_scatter, start_allreduce
from quant.types import Array


class Redistribute(Operator):
    """Base class: an operator without parameters that takes one placement along `axis` and gives another.

    `like` is a parameter of the storage dtype. `algorithm` makes the sums: "tree" adds in an order that does not
    depend on the number of ranks.
    """

    takes: ClassVar[Placement]
    gives: ClassVar[Placement]
    exchanges = True

    def __init__(self, axis: Any, like: Parameter, algorithm: str = "auto"):
        self.axis, self.algorithm, self._like = axis, algorithm, like

    def _rounded(self, x: Array) -> Array:
        return narrow(x, self._like.dtype)

    def members(self) -> Iterator[tuple[str, Parameter | Operator]]:
        """No members: `like` belongs to the operator that is cut."""
        yield from ()

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        if axis == self.axis.name:
            if x != self.takes:
                raise self.refuse(axis, x, str(self.takes))
            return self.gives
        if isinstance(x, Partial):
            raise self.refuse(axis, x)
        return x


class CopyToShards(Redistribute):
    """f: identity. The gradients of the ranks' copies are summed."""

    continues = True

    takes, gives = Replicate(), Replicate(partial=True)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        return x, ()

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return self.start_backward(dy)()

    def start_backward(self, dy: Array) -> Callable[[], Array]:
        """Start the backward pass. Return a function that completes it and returns dx."""
        if dy is None:
            return lambda: None
        complete = start_allreduce(self.axis, dy, self.algorithm)
        return lambda: self._rounded(complete())

    def outline(self, x: ArraySpec) -> OperatorOutline:
        return OperatorOutline(x, (), 0, x.nbytes)


class SumShards(Redistribute):
    """g: sum of the ranks' partial results. In the backward pass every rank has the whole gradient already."""

    continues = True

    takes, gives = Partial(), Replicate()

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        return self._rounded(allreduce(self.axis, x, self.algorithm)), ()

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return dy

    def outline(self, x: ArraySpec) -> OperatorOutline:
        return OperatorOutline(ArraySpec(x.shape, self._like.dtype), (), 0, x.nbytes)


class _AlongSequence(Redistribute):
    """Base class of exchanges of parts of a sequence, dimension 1 of arrays (batch, length, width), of equal length."""

    def refuse(self, axis: str, x: Placement, expected: str = "another placement") -> PlacementError:
        if x == Replicate():
            name = f"{type(self).__name__} {self.name}".rstrip()
            text = f"sequence_parallel: expected a model of sequences; {name} takes their parts along {axis}, found {x}"
            return PlacementError(text)
        return super().refuse(axis, x, expected)

    def _parts(self, length: int) -> list[int]:
        """Lengths of the ranks' parts of a whole `length`. ValueError if they are not equal."""
        size, axis = self.axis.size, self.axis.name
        if length % size:
            raise ValueError(
                f"sequence_parallel: expected a multiple of {size} tokens, in {axis}={size}; found {length}"
            )
        return [length // size] * size


class GatherSequence(_AlongSequence):
    """f of sequence parallelism: the whole sequence from the ranks' parts. Its gradient is summed and cut."""

    takes, gives = Shard(1), Replicate(partial=True)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        return allgather(self.axis, x, 1, [x.shape[1]] * self.axis.size), ()

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return self._rounded(reduce_scatter(self.axis, dy, 1, self._parts(dy.shape[1]), self.algorithm))

    def outline(self, x: ArraySpec) -> OperatorOutline:
        y = ArraySpec((x.shape[0], x.shape[1] * self.axis.size, *x.shape[2:]), x.dtype)
        return OperatorOutline(y, (), 0, 2 * y.nbytes)


class ScatterSequence(_AlongSequence):
    """g of sequence parallelism: this rank's part of the sum over the ranks. Its gradient is gathered."""

    takes, gives = Partial(), Shard(1)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        return self._rounded(reduce_scatter(self.axis, x, 1, self._parts(x.shape[1]), self.algorithm)), ()

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return allgather(self.axis, dy, 1, [dy.shape[1]] * self.axis.size)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        part = self._parts(x.shape[1])[self.axis.rank]
        return OperatorOutline(ArraySpec((x.shape[0], part, *x.shape[2:]), self._like.dtype), (), 0, 2 * x.nbytes)
