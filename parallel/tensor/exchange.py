"""Exchanges of arrays along a mesh axis: sum, gather, and sum with scatter, along one dimension.

An axis is a `parallel.mesh.device_mesh.MeshAxis` or anything with `rank`, `size` and `comm`. float16 and bfloat16 are
summed in float32. Along an axis of one rank nothing is exchanged. Costs are for n bytes of the whole.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from parallel.nn import kernels
from parallel.nn.kernels.storage import movable, widen
from quant.types import Array


def allreduce(axis: Any, x: Array, algorithm: str = "auto", op: MPI.Op = MPI.SUM) -> Array:
    """Sum (or `op`) of the ranks' arrays of equal shape, on every rank; half types become float32.

    Cost: 2(t-1)/t n beta + (t-1)/t n gamma.
    """
    if axis.size == 1:
        return widen(x)
    xp, terms = kernels.array_namespace(x), widen(x)
    total = xp.empty(x.shape, terms.dtype)
    axis.comm.Allreduce(xp.ascontiguousarray(terms), total, op=op, algorithm=algorithm)
    return total


def start_allreduce(axis: Any, x: Array, algorithm: str = "auto") -> Callable[[], Array]:
    """Start `allreduce`, if the axis leaves a node; return a function that completes it and returns the sum.

    Within a node the sum is made by that function: cores that compute would have to make it meanwhile.
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
    """This rank's part along `dim`, of `lengths` by rank, of the ranks' sum; half types become float32."""
    if axis.size == 1:
        return widen(x)
    xp = kernels.array_namespace(x)
    terms = xp.ascontiguousarray(xp.moveaxis(widen(x), dim, 0))
    part = xp.empty((lengths[axis.rank], *terms.shape[1:]), terms.dtype)
    row = terms[:1].size
    axis.comm.Reduce_scatter(terms, part, [length * row for length in lengths], algorithm=algorithm)
    return xp.ascontiguousarray(xp.moveaxis(part, 0, dim))
