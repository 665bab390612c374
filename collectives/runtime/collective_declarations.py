"""Collectives of a communicator, each declared once: name, validation of its arguments, documentation.

`collective_forms` builds the blocking, ``I...`` and ``..._init`` methods from these declarations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives.runtime import call as calls
from collectives.runtime.call import Call


class Declaration(NamedTuple):
    """One collective: `describe` validates the arguments of mpi4py's method `name` and returns the `Call`.

    `v_form`: for blocks of any length; its programs depend on counts, so calls are not looked up by their arguments.
    """

    name: str
    describe: Callable[..., Call]
    summary: str
    buffers: tuple[str, ...] = ()
    v_form: bool = False


_OPERANDS = "n elements, or ``MPI.IN_PLACE`` on all ranks, whose operands are then in `recvbuf`."
_RESULT = "n elements of the same type."
_OWN = "One block, or ``MPI.IN_PLACE`` on all ranks, whose blocks are then in `recvbuf`."
_ANY_LENGTH = "``[array, counts]``, ``[array, counts, displs, type]`` and so on"

DECLARATIONS = (
    Declaration("Barrier", calls.barrier, "Return once all ranks have entered the barrier."),
    Declaration(
        "Bcast",
        calls.broadcast,
        "Send the root's vector to all ranks.",
        ("The vector: read at the root, written elsewhere. The same number of bytes on all ranks.",),
    ),
    Declaration(
        "Reduce",
        calls.reduce,
        "Reduce the vectors of all ranks, element by element, into the root's `recvbuf`.",
        (
            "n elements; ``MPI.IN_PLACE`` at the root, whose operand is then in `recvbuf`.",
            "n elements of the same type at the root; ignored elsewhere, where it may be None.",
        ),
    ),
    Declaration(
        "Allreduce",
        calls.allreduce,
        "Reduce the vectors of all ranks, element by element, into every rank's `recvbuf`.\n\n"
        'All ranks get the same bits, unless the requested algorithm is documented otherwise (``"census"``).',
        (_OPERANDS, _RESULT),
    ),
    Declaration(
        "Scatter",
        calls.scatter,
        "Send block r of the root's `sendbuf` to rank r; blocks of equal length.",
        (
            "p blocks at the root; ignored elsewhere, where it may be None.",
            "One block; ``MPI.IN_PLACE`` at the root leaves its block in `sendbuf`.",
        ),
    ),
    Declaration(
        "Gather",
        calls.gather,
        "Collect one block of every rank in the root's `recvbuf`; blocks of equal length.",
        (
            "One block; ``MPI.IN_PLACE`` at the root, whose block is then in `recvbuf`.",
            "p blocks at the root; ignored elsewhere, where it may be None.",
        ),
    ),
    Declaration(
        "Allgather",
        calls.allgather,
        "Collect one block of every rank in every rank's `recvbuf`; blocks of equal length.",
        (_OWN, "p blocks."),
    ),
    Declaration(
        "Reduce_scatter_block",
        calls.reduce_scatter_block,
        "Reduce the vectors of all ranks and store block r of the result on rank r; blocks of equal length.",
        (
            "p blocks; or ``MPI.IN_PLACE`` on all ranks, whose operands are then in `recvbuf`.",
            "One block; in place p blocks, of which the first receives the result and the others are unchanged.",
        ),
    ),
    Declaration(
        "Reduce_scatter",
        calls.reduce_scatter,
        "Reduce the vectors of all ranks and store block r of the result, ``recvcounts[r]`` elements, on rank r.",
        (
            "All blocks; or ``MPI.IN_PLACE`` on all ranks, whose operands are then in `recvbuf`.",
            "One block; in place all blocks: the result is stored at the beginning, the rest is unchanged.",
        ),
        v_form=True,
    ),
    Declaration(
        "Scatterv",
        calls.scatter,
        "Send block r of the root's `sendbuf` to rank r; blocks of any length.",
        (
            f"{_ANY_LENGTH} at the root; ignored elsewhere, where it may be None.",
            "One block of the length given at the root; ``MPI.IN_PLACE`` at the root leaves its block in `sendbuf`.",
        ),
        v_form=True,
    ),
    Declaration(
        "Gatherv",
        calls.gather,
        "Collect one block of every rank in the root's `recvbuf`; blocks of any length.",
        (
            "One block of the length given at the root; ``MPI.IN_PLACE`` at the root, whose block is then in "
            "`recvbuf`.",
            f"{_ANY_LENGTH} at the root; ignored elsewhere, where it may be None.",
        ),
        v_form=True,
    ),
    Declaration(
        "Allgatherv",
        calls.allgather,
        "Collect one block of every rank in every rank's `recvbuf`; blocks of any length.",
        (_OWN, f"{_ANY_LENGTH}, the same counts on all ranks."),
        v_form=True,
    ),
    Declaration(
        "Alltoall",
        calls.alltoall,
        "Send one block to every rank and receive one from each; blocks of equal length.",
        (
            "p blocks, block r for rank r; or ``MPI.IN_PLACE`` on all ranks, whose blocks are then in `recvbuf`.",
            "p blocks, block r from rank r.",
        ),
    ),
    Declaration(
        "Alltoallv",
        calls.alltoall,
        "Send one block to every rank and receive one from each; blocks of any length.",
        (
            f"{_ANY_LENGTH}; or ``MPI.IN_PLACE`` on all ranks, whose blocks are then in `recvbuf`.",
            "The same forms; block r has the length of the block that rank r sends.",
        ),
        v_form=True,
    ),
    Declaration(
        "Scan",
        calls.scan,
        "Reduce the vectors of ranks 0 to this one, element by element and in rank order.",
        ("n elements, or ``MPI.IN_PLACE``, if they are in `recvbuf`.", _RESULT),
    ),
    Declaration(
        "Exscan",
        calls.exscan,
        "Reduce the vectors of the ranks below this one, in rank order; rank 0's `recvbuf` is unchanged.",
        ("n elements, or ``MPI.IN_PLACE``, if they are in `recvbuf`.", _RESULT),
    ),
)
