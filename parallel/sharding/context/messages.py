"""Exchanges of arrays along a mesh axis: a ring of messages under way during computation, and unequal parts."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.runtime.execution.message_wait import wait_for
from parallel.nn import kernels
from parallel.nn.kernels.storage import movable
from parallel.runtime.vector_memory import to_host
from parallel.sharding.context.sequence_division import SequenceDivision
from quant.types import Array


class RingShift:
    """Shift of an array to the next rank of an axis, non-blocking: `start`, `progress` while computing, `wait`.

    Shifts that are under way together have different tags.
    """

    def __init__(self, axis: Any, tag: int):
        self._comm, self._tag = axis.comm, tag
        self._next, self._previous = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        self._requests: list[Any] = []
        self._buffers: tuple[np.ndarray, ...] = ()
        self._target: Array = None

    def start(self, x: Array, target: Array) -> None:
        """Send x, and receive the previous rank's array into `target`. x must not change until `wait`."""
        self._target = target
        arriving = target if isinstance(target, np.ndarray) else np.empty(target.shape, target.dtype)
        sent = to_host(x)
        self._buffers = arriving, sent
        receive = self._comm.Irecv([_bytes(arriving), MPI.BYTE], self._previous, self._tag)
        self._requests = [receive, self._comm.Isend([_bytes(sent), MPI.BYTE], self._next, self._tag)]

    def progress(self) -> None:
        """Drive the messages. Long computations call it now and then."""
        for request in self._requests:
            request.Test()

    def wait(self) -> Array:
        """Complete both messages. Return the array received."""
        for request, peer in zip(self._requests, (self._previous, self._next)):
            wait_for(request.Test, "ring", self._comm, peer)
        arriving, target = self._buffers[0], self._target
        if arriving is not target:
            target[...] = kernels.array_namespace(target).asarray(arriving)
        self._requests, self._buffers, self._target = [], (), None
        return target


def allgather(axis: Any, x: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Arrays of all ranks, of these shapes by rank and the dtype of x, this rank's."""
    if axis.size == 1:
        return [x]
    counts = [math.prod(shape) for shape in shapes]
    whole = kernels.array_namespace(x).empty(sum(counts), x.dtype)
    axis.comm.Allgatherv(movable(x.reshape(-1)), [movable(whole), counts])
    return views(whole, shapes)


def allgather_positions(axis: Any, division: SequenceDivision, x: Array) -> Array:
    """Values of whole sequences, (sequences, length, ...), from the values of every rank's positions."""
    xp, rest = kernels.array_namespace(x), x.shape[2:]
    parts = allgather(axis, xp.ascontiguousarray(x), [(len(x), size, *rest) for size in division.sizes])
    whole = xp.empty((len(x), division.length, *rest), x.dtype)
    for rank, part in enumerate(parts):
        whole[:, xp.asarray(division.positions(rank))] = part
    return whole


def alltoall(axis: Any, sent: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Send array ``sent[j]`` to rank j. Return the arrays of all ranks for this one, of these shapes."""
    if axis.size == 1:
        return list(sent)
    xp = kernels.array_namespace(sent[0])
    flat = xp.concatenate([x.reshape(-1) for x in sent])
    counts = [math.prod(shape) for shape in shapes]
    received = xp.empty(sum(counts), flat.dtype)
    axis.comm.Alltoallv([movable(flat), [x.size for x in sent]], [movable(received), counts])
    return views(received, shapes)


def views(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Views of a vector in these shapes, one after another."""
    made, at = [], 0
    for shape in shapes:
        size = math.prod(shape)
        made.append(flat[at : at + size].reshape(shape))
        at += size
    return made


def _bytes(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint8)
