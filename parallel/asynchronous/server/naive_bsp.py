"""Naive parameter server with bulk-synchronous steps, on collectives only: reference for the message-based one."""

from collections.abc import Callable, Sequence
from itertools import chain

from mpi4py import MPI

from quant.types import Array

SERVER = 0  # its rank; the other ranks are workers


def train(
    comm: MPI.Intracomm,
    weights: Array,
    parts: Sequence[int],
    gradient: Callable[[Array, int, int], Array],
    update: Callable[[Array, int, Array], None],
) -> None:
    """Run ``len(parts)`` steps of ``parts[step]`` micro-batches. `weights` change on the server. Workers copy them.

    A step without micro-batches is no update.

    ``gradient(weights, step, part)`` is called on workers, ``update(weights, step, sum of gradients)`` on the server.
    Collective. Workers end with the weights before the last update.
    """
    rank, workers = comm.Get_rank(), comm.Get_size() - 1
    for step, count in enumerate(parts):
        comm.Bcast(weights, root=SERVER)  # pull
        own = range(rank - 1, count, workers) if rank != SERVER else ()
        pushed = comm.gather([(part, gradient(weights, step, part)) for part in own], root=SERVER)
        if rank == SERVER and count:
            by_part = dict(chain.from_iterable(pushed or ()))
            update(weights, step, tree_sum([by_part[part] for part in range(count)]))


def tree_sum(vectors: Sequence[Array]) -> Array:
    """Sum of at least one vector in a fixed binary tree: the assignment of micro-batches to workers does not matter."""
    if len(vectors) == 1:
        return vectors[0]
    left = 1 << (len(vectors) - 1).bit_length() - 1  # the largest power of two below
    return tree_sum(vectors[:left]) + tree_sum(vectors[left:])
