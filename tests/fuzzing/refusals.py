"""Calls with one wrong argument, which all ranks refuse before anything is sent."""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

BUFFERS = {
    **dict.fromkeys(("Bcast", "Reduce", "Allreduce", "Gather", "Allgather", "Alltoall", "Scan", "Exscan"), 0),
    **dict.fromkeys(("Reduce_scatter_block", "Gatherv"), 0),
    "Scatter": 1,
}
"""Methods, and which of their arguments is a buffer that every rank has: only wrong ones of these are drawn."""

LENGTH = 24
"""Elements of a vector or block."""

WRONG: dict[str, tuple[type[Exception], Callable[[np.ndarray], Any]]] = {
    "every other element": (BufferError, lambda array: np.repeat(array, 2)[::2]),
    "backwards": (BufferError, lambda array: array[::-1]),
    "columns of a matrix": (BufferError, lambda array: np.zeros((4, LENGTH))[:, ::4]),
    "memoryview with gaps": (BufferError, lambda array: memoryview(np.repeat(array, 2))[::2]),
    "negative count": (ValueError, lambda array: [array, -1, MPI.DOUBLE]),
    "negative displacement": (ValueError, lambda array: [array, (1, -1), MPI.DOUBLE]),
    "displacement behind the end": (ValueError, lambda array: [array, (1, 4 * LENGTH), MPI.DOUBLE]),
    "count that is no integer": (TypeError, lambda array: [array, 2.5, MPI.DOUBLE]),
    "five items": (ValueError, lambda array: [array, 1, 0, MPI.DOUBLE, 3]),
    "one item": (ValueError, lambda array: [array]),
    "null datatype": (ValueError, lambda array: [array, MPI.DATATYPE_NULL]),
    "unknown typecode": (KeyError, lambda array: [array, "xyz"]),
    "objects": (KeyError, lambda array: np.array([None] * LENGTH)),
    "no buffer": (TypeError, lambda array: object()),
    "number": (TypeError, lambda array: 5),
    "text": (TypeError, lambda array: "text"),
}
"""Wrong buffers made of a right one, and mpi4py's error; ours is derived from it."""


class Refusal(NamedTuple):
    """Method, its arguments, of which one is wrong, and the class of the error."""

    method: str
    arguments: list[Any]
    keywords: dict[str, Any]
    error: type[Exception]


def refusal(pick: int, size: int) -> Refusal:
    """Draw a call that is refused on all of `size` ranks."""
    chance = Random(pick)
    method = chance.choice(list(BUFFERS))
    rooted = method in ("Bcast", "Reduce", "Gather", "Gatherv", "Scatter")
    kind = chance.choice([*WRONG, *["root"] * 2 * rooted])
    if kind == "root":
        return Refusal(method, _right(method, size), {"root": chance.choice((-2, size, size + 7))}, MPI.Exception)
    error, spoil = WRONG[kind]
    arguments = _right(method, size)
    arguments[BUFFERS[method]] = spoil(np.arange(float(LENGTH)))
    return Refusal(method, arguments, {}, error)


def _right(method: str, size: int) -> list[Any]:
    """Right arguments of a method, the same on all ranks."""
    vector, blocks = np.zeros(LENGTH), np.zeros(LENGTH * size)
    sends_blocks = method in ("Alltoall", "Reduce_scatter_block", "Scatter")
    receives_blocks = method in ("Alltoall", "Allgather", "Gather", "Gatherv")
    arguments = [blocks if sends_blocks else vector, blocks.copy() if receives_blocks else vector.copy()]
    return arguments[:1] if method == "Bcast" else arguments
