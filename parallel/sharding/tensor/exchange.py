"""Exchanges of arrays along a mesh axis: sum, gather, and sum with scatter, along one dimension.

An axis is a `parallel.sharding.device_mesh.MeshAxis` or anything with `rank`, `size` and `comm`. float16 and bfloat16
are summed in float32. Along an axis of one rank nothing is exchanged. Costs are for n bytes of the whole.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.runtime.execution.message_wait import wait_for
from collectives.schedule.chunks import even
from parallel.nn import kernels
from parallel.nn.array_checks import named
from parallel.nn.kernels.storage import movable, widen
from parallel.runtime.vector_memory import to_host
from quant.types import Array

TAG = 1
"""Of messages along an axis."""


def allreduce(axis: Any, x: Array, algorithm: str = "auto", op: MPI.Op = MPI.SUM) -> Array:
    """Sum (or `op`) of the ranks' arrays of equal shape, on every rank. Half types become float32.

    Cost: 2(t-1)/t n beta + (t-1)/t n gamma.
    """
    if axis.size == 1:
        return widen(x)
    xp, terms = kernels.array_namespace(x), widen(x)
    total = xp.empty(x.shape, terms.dtype)
    axis.comm.Allreduce(xp.ascontiguousarray(terms), total, op=op, algorithm=algorithm)
    return total


def start_allreduce(axis: Any, x: Array, algorithm: str = "auto") -> Callable[[], Array]:
    """Start `allreduce`, if the axis leaves a node. Return a function that completes it and returns the sum.

    Within a node the sum starts only when that function is called: ranks make it on the cores that compute until then.
    """
    if axis.size == 1 or axis.comm.nodes is None:
        return lambda: allreduce(axis, x, algorithm)
    xp = kernels.array_namespace(x)
    terms = xp.ascontiguousarray(widen(x))
    total = xp.empty(x.shape, terms.dtype)
    request = axis.comm.Iallreduce(terms, total, algorithm=algorithm)

    def complete() -> Array:
        request.Wait()
        return total

    return complete


def allgather(axis: Any, x: Array, dim: int, lengths: Sequence[int]) -> Array:
    """The ranks' arrays side by side along dimension `dim`, where theirs are `lengths`. Cost: (t-1)/t n beta."""
    if axis.size == 1:
        return x
    xp = kernels.array_namespace(x)
    first = xp.ascontiguousarray(xp.moveaxis(x, dim, 0))
    whole = xp.empty((sum(lengths), *first.shape[1:]), x.dtype)
    row = whole[:1].size
    axis.comm.Allgatherv(movable(first), [movable(whole), [length * row for length in lengths]])
    return xp.ascontiguousarray(xp.moveaxis(whole, 0, dim))


def reduce_scatter(axis: Any, x: Array, dim: int, lengths: Sequence[int], algorithm: str = "auto") -> Array:
    """Sum of the ranks' arrays. A rank gets its part along `dim`, of `lengths` by rank. Half types become float32."""
    if axis.size == 1:
        return widen(x)
    xp = kernels.array_namespace(x)
    terms = xp.ascontiguousarray(xp.moveaxis(widen(x), dim, 0))
    part = xp.empty((lengths[axis.rank], *terms.shape[1:]), terms.dtype)
    row = terms[:1].size
    axis.comm.Reduce_scatter(terms, part, [length * row for length in lengths], algorithm=algorithm)
    return xp.ascontiguousarray(xp.moveaxis(part, 0, dim))


def allreduce_among(axis: Any, terms: Sequence[Array], holders: Sequence[range]) -> list[Array]:
    """Sums of arrays that only some ranks of the axis have, on these ranks. Half types become float32.

    `terms` are this rank's, and `holders` the ranks that have a term of each. All have them in the same order. Each
    holder adds up one part, by the binary tree over the ranks of the axis, and sends it to the others. Cost of an
    array of n bytes on r ranks: 2(r-1)/r n beta + (r-1)/r n gamma.
    """
    if all(len(ranks) == 1 for ranks in holders):  # then no other rank expects a message
        return [widen(term) for term in terms]
    copies = [_SharedTerm(axis, term, ranks) for term, ranks in zip(terms, holders)]
    _swap(axis.comm, [message for copy in copies for message in copy.terms()])
    _swap(axis.comm, [message for copy in copies for message in copy.sums()])
    return [kernels.array_namespace(term).asarray(copy.values.reshape(term.shape)) for copy, term in zip(copies, terms)]


class Operands:
    """This rank's operands of exchanges, computed one after another: arrays of one shape, dtype and namespace.

    After an error zeros take the place of this operand and those that follow, so that this rank makes all exchanges.
    The error is noted in `errors`, by its method `add`, or raised if that is None.
    """

    def __init__(self, errors: Any, shape: tuple[int, ...], dtype: np.dtype, namespace: Any):
        self._errors, self._form, self._namespace, self._failed = errors, (shape, dtype), namespace, False

    def __call__(self, compute: Callable[[], Array]) -> Array:
        if not self._failed:
            try:
                return compute()
            except BaseException as error:
                if self._errors is None:
                    raise
                self._errors.add(named(error))
                self._failed = True
        return self._namespace.zeros(*self._form)


Message = tuple[np.ndarray, np.ndarray, int]
"""Array for a rank, array that arrives from it, and the rank."""


class _SharedTerm:
    """An array that some ranks of an axis have: `values` are this rank's term, and at the end the sum."""

    def __init__(self, axis: Any, term: Array, ranks: range):
        self.values, self._axis = np.array(to_host(widen(term))).reshape(-1), axis
        bounds = pairwise(accumulate(even(len(self.values), len(ranks)), initial=0))
        self._parts = {rank: self.values[start:stop] for rank, (start, stop) in zip(ranks, bounds)}
        self._own = self._parts.pop(axis.rank)
        self._arriving = {rank: np.empty_like(self._own) for rank in self._parts}

    def terms(self) -> list[Message]:
        """Messages of the terms of every holder's part."""
        return [(part, self._arriving[rank], rank) for rank, part in self._parts.items()]

    def sums(self) -> list[Message]:
        """Add up the own part. Messages of the sums."""
        by_rank = {**self._arriving, self._axis.rank: self._own}
        self._own[...] = tree_sum([by_rank.get(rank) for rank in range(self._axis.size)])
        return [(self._own, part, rank) for rank, part in self._parts.items()]


def _swap(comm: Any, messages: Iterable[Message]) -> None:
    """Send and receive all messages."""
    requests = []
    for sent, arriving, rank in messages:
        requests += [(rank, comm.Irecv(arriving, rank, TAG)), (rank, comm.Isend(sent, rank, TAG))]
    for rank, request in requests:
        wait_for(request.Test, "exchange", comm, rank)


def tree_sum(terms: Sequence[Array | None]) -> Array:
    """Sum of arrays by the binary tree of neighbours. Half types become float32. Terms that are None are left out. The

    tree of a power of two of terms is a subtree of the tree of any more terms.
    """
    level = [None if term is None else widen(term) for term in terms]
    while len(level) > 1:
        pairs = list(zip(level[::2], level[1::2]))
        sums = [left if right is None else right if left is None else left + right for left, right in pairs]
        level = sums + level[len(sums) * 2 :]
    return level[0]
