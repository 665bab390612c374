"""Collectives of a communicator, each declared once: arguments, documentation, and the `Call` that they describe.

`collective_forms` builds the blocking, ``I...`` and ``..._init`` methods from these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mpi4py import MPI

from collectives.runtime import call as calls
from collectives.runtime.call import Call


class CallContext(Protocol):
    """Attributes of a communicator that declarations use."""

    _rank: int
    _size: int

    def _counts(self, sendbuf: Any, recvbuf: Any, recvcounts: Any) -> Any: ...


class Declaration(NamedTuple):
    """One collective: `describe(comm, *arguments)` validates the arguments and returns the `Call`.

    `cached_as` is the name under which repeated blocking calls are looked up; None for a collective whose programs are
    found only after its counts are known.
    """

    name: str
    describe: Callable[..., Call]
    cached_as: str | None


DECLARATIONS: list[Declaration] = []


def collective(cached_as: str | None = None) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
    """Declare a collective by a function of the communicator and the arguments."""

    def declare(describe: Callable[..., Call]) -> Callable[..., Call]:
        DECLARATIONS.append(Declaration(describe.__name__, describe, cached_as))
        return describe

    return declare


@collective("barrier")
def Barrier(comm: CallContext) -> Call:
    """Return once all ranks have entered the barrier."""
    return calls.barrier()


@collective("broadcast")
def Bcast(comm: CallContext, buf: Any, root: int = 0) -> Call:
    """Send the root's vector to all ranks.

    Parameters
    ----------
    buf : buffer
        The vector: read at the root, written elsewhere. The same number of bytes on all ranks.
    root : int
    """
    return calls.broadcast(buf, root, comm._rank, comm._size)


@collective("reduce")
def Reduce(comm: CallContext, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> Call:
    """Reduce the vectors of all ranks, element by element, into the root's `recvbuf`.

    Parameters
    ----------
    sendbuf : buffer
        n elements; ``MPI.IN_PLACE`` at the root, whose operand is then in `recvbuf`.
    recvbuf : buffer or None
        n elements of the same type at the root; ignored elsewhere.
    op : MPI.Op
        Predefined or user-defined; ranks are combined in order if it does not commute.
    root : int
    """
    return calls.reduce(sendbuf, recvbuf, op, root, comm._rank, comm._size)


@collective("allreduce")
def Allreduce(comm: CallContext, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Call:
    """Reduce the vectors of all ranks, element by element, into every rank's `recvbuf`.

    All ranks get the same bits, unless the requested algorithm is documented otherwise (``"census"``).

    Parameters
    ----------
    sendbuf : buffer
        n elements, or ``MPI.IN_PLACE`` on all ranks, whose operands are then in `recvbuf`.
    recvbuf : buffer
        n elements of the same type.
    op : MPI.Op
        Predefined or user-defined; ranks are combined in order if it does not commute.
    """
    return calls.allreduce(sendbuf, recvbuf, op, comm._rank, comm._size)


@collective("scatter")
def Scatter(comm: CallContext, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
    """Send block r of the root's `sendbuf` to rank r; blocks of equal length.

    Parameters
    ----------
    sendbuf : buffer or None
        p blocks at the root; ignored elsewhere.
    recvbuf : buffer
        One block; ``MPI.IN_PLACE`` at the root leaves its block in `sendbuf`.
    root : int
    """
    return calls.scatter(sendbuf, recvbuf, root, comm._rank, comm._size)


@collective("gather")
def Gather(comm: CallContext, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
    """Collect one block of every rank in the root's `recvbuf`; blocks of equal length.

    Parameters
    ----------
    sendbuf : buffer
        One block; ``MPI.IN_PLACE`` at the root, whose block is then in `recvbuf`.
    recvbuf : buffer or None
        p blocks at the root; ignored elsewhere.
    root : int
    """
    return calls.gather(sendbuf, recvbuf, root, comm._rank, comm._size)


@collective("allgather")
def Allgather(comm: CallContext, sendbuf: Any, recvbuf: Any) -> Call:
    """Collect one block of every rank in every rank's `recvbuf`; blocks of equal length.

    Parameters
    ----------
    sendbuf : buffer
        One block, or ``MPI.IN_PLACE`` on all ranks, whose blocks are then in `recvbuf`.
    recvbuf : buffer
        p blocks.
    """
    return calls.allgather(sendbuf, recvbuf, comm._rank, comm._size)


@collective("reduce_scatter_block")
def Reduce_scatter_block(comm: CallContext, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Call:
    """Reduce the vectors of all ranks and store block r of the result on rank r; blocks of equal length.

    Parameters
    ----------
    sendbuf : buffer
        p blocks; or ``MPI.IN_PLACE`` on all ranks, whose operands are then in `recvbuf`.
    recvbuf : buffer
        One block; in place p blocks, of which the first receives the result and the others are unchanged.
    op : MPI.Op
        Predefined or user-defined; ranks are combined in order if it does not commute.
    """
    return calls.reduce_scatter_block(sendbuf, recvbuf, op, comm._rank, comm._size)


@collective()
def Reduce_scatter(comm: CallContext, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM) -> Call:
    """Reduce the vectors of all ranks and store block r of the result, ``recvcounts[r]`` elements, on rank r.

    Parameters
    ----------
    sendbuf : buffer
        All blocks; or ``MPI.IN_PLACE`` on all ranks, whose operands are then in `recvbuf`.
    recvbuf : buffer
        One block; in place all blocks: the result is stored at the beginning, the rest is unchanged.
    recvcounts : sequence of int, optional
        Elements for each rank; by default the size of each rank's `recvbuf`.
    op : MPI.Op
        Predefined or user-defined; ranks are combined in order if it does not commute.
    """
    counts = comm._counts(sendbuf, recvbuf, recvcounts)
    return calls.reduce_scatter(sendbuf, recvbuf, counts, op, comm._rank, comm._size)


@collective()
def Scatterv(comm: CallContext, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
    """Send block r of the root's `sendbuf` to rank r; blocks of any length.

    Parameters
    ----------
    sendbuf : buffer or None
        ``[array, counts]``, ``[array, counts, displs, type]`` and so on at the root; ignored elsewhere.
    recvbuf : buffer
        One block of the length given at the root; ``MPI.IN_PLACE`` at the root leaves its block in `sendbuf`.
    root : int
    """
    return calls.scatterv(sendbuf, recvbuf, root, comm._rank, comm._size)


@collective()
def Gatherv(comm: CallContext, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
    """Collect one block of every rank in the root's `recvbuf`; blocks of any length.

    Parameters
    ----------
    sendbuf : buffer
        One block of the length given at the root; ``MPI.IN_PLACE`` at the root, whose block is then in `recvbuf`.
    recvbuf : buffer or None
        ``[array, counts]``, ``[array, counts, displs, type]`` and so on at the root; ignored elsewhere.
    root : int
    """
    return calls.gatherv(sendbuf, recvbuf, root, comm._rank, comm._size)


@collective()
def Allgatherv(comm: CallContext, sendbuf: Any, recvbuf: Any) -> Call:
    """Collect one block of every rank in every rank's `recvbuf`; blocks of any length.

    Parameters
    ----------
    sendbuf : buffer
        One block, or ``MPI.IN_PLACE`` on all ranks, whose blocks are then in `recvbuf`.
    recvbuf : buffer
        ``[array, counts]``, ``[array, counts, displs, type]`` and so on, the same counts on all ranks.
    """
    return calls.allgatherv(sendbuf, recvbuf, comm._rank, comm._size)


@collective("alltoall")
def Alltoall(comm: CallContext, sendbuf: Any, recvbuf: Any) -> Call:
    """Send one block to every rank and receive one from each; blocks of equal length.

    Parameters
    ----------
    sendbuf : buffer
        p blocks, block r for rank r; or ``MPI.IN_PLACE`` on all ranks, whose blocks are then in `recvbuf`.
    recvbuf : buffer
        p blocks, block r from rank r.
    """
    return calls.alltoall(sendbuf, recvbuf, comm._rank, comm._size)


@collective()
def Alltoallv(comm: CallContext, sendbuf: Any, recvbuf: Any) -> Call:
    """Send one block to every rank and receive one from each; blocks of any length.

    Parameters
    ----------
    sendbuf : buffer
        ``[array, counts]``, ``[array, counts, displs, type]`` and so on; or ``MPI.IN_PLACE`` on all ranks, whose
        blocks are then in `recvbuf`.
    recvbuf : buffer
        The same forms; block r has the length of the block that rank r sends.
    """
    return calls.alltoallv(sendbuf, recvbuf, comm._rank, comm._size)


@collective("scan")
def Scan(comm: CallContext, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Call:
    """Reduce the vectors of ranks 0 to this one, element by element and in rank order.

    Parameters
    ----------
    sendbuf : buffer
        n elements, or ``MPI.IN_PLACE``, if they are in `recvbuf`.
    recvbuf : buffer
        n elements of the same type.
    op : MPI.Op
        Predefined or user-defined.
    """
    return calls.scan(sendbuf, recvbuf, op, comm._rank, comm._size)


@collective("exscan")
def Exscan(comm: CallContext, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Call:
    """Reduce the vectors of the ranks below this one, in rank order; rank 0's `recvbuf` is unchanged.

    Parameters
    ----------
    sendbuf : buffer
        n elements, or ``MPI.IN_PLACE``, if they are in `recvbuf`.
    recvbuf : buffer
        n elements of the same type.
    op : MPI.Op
        Predefined or user-defined.
    """
    return calls.exscan(sendbuf, recvbuf, op, comm._rank, comm._size)
