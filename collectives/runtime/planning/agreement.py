"""Agreement of all ranks: argument errors, node numbers, and a persistent request's memory and mailbox channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from collectives.errors import InvalidArgument, InvalidInput, InvalidType, OutOfMemory
from collectives.runtime.arguments.call import Call, staged
from collectives.runtime.binding.call_binding import buffer_spans
from collectives.runtime.execution.progress import progress_until
from collectives.runtime.requests.program_end import open_communicators
from collectives.selection.select import forwards_data
from collectives.selection.timing_table import TimingTable
from collectives.transport.node.mailbox import NodeMemory
from collectives.transport.node.mailbox_layout import CHANNELS, NONBLOCKING
from collectives.transport.waits import seconds_of

Value = TypeVar("Value")

MANY = 100
"""Open communicators from which on an error of the MPI may be due to their number."""


def gather_or_raise(comm: MPI.Intracomm, value: Value | InvalidInput) -> list[Value]:
    """Allgather `value`: return the list by rank, or raise on all ranks if one passed an `InvalidInput`. Collective."""
    values: list[Value] = []
    for rank, other in enumerate(comm.allgather(value)):
        if isinstance(other, InvalidInput):
            raise type(other)(other.Get_error_class(), f"{other} on rank {rank}")
        values.append(other)
    return values


def without_attributes(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Duplicate a communicator, but not its attributes: users see how often these are copied. Collective."""
    if comm.Get_topology() != MPI.UNDEFINED:  # MPICH 5.0 gives a grid of some of the ranks the group of all
        return MPI.Intracomm(MPI.Intracomm.Split(comm, 0, comm.Get_rank()))
    group = comm.Get_group()
    duplicate = MPI.Intracomm(MPI.Intracomm.Create(comm, group))
    group.Free()
    return duplicate


@contextmanager
def counting_communicators() -> Iterator[None]:
    """Add to an error of the MPI that there are many communicators, of which each takes two of its contexts."""
    try:
        yield
    except MPI.Exception as error:
        if isinstance(error, InvalidInput) or len(open_communicators) < MANY:
            raise
        text = f"{len(open_communicators)} communicators are open, and each takes 2 of the contexts that the MPI has"
        found = f"{error.Get_error_string()}: {text}; Free() or close() those that are no longer used"
        raise OutOfMemory(error.Get_error_class(), found) from error


def common(comm: MPI.Intracomm, bits: int) -> int:
    """Bitwise AND of `bits` over all ranks. Collective."""
    mine, common_bits = np.array([bits]), np.zeros(1, np.int64)
    # Other ranks may wait for active requests of this one.
    progress_until(comm.Iallreduce(mine, common_bits, MPI.BAND).Test)
    return int(common_bits[0])


def agree_on_nodes(comm: MPI.Intracomm, nodes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return `nodes` (every rank's node number) if valid and the same on all ranks, else raise on all. Collective."""
    given: tuple[int, ...] | InvalidType | None
    try:
        given = None if nodes is None else tuple(index(node) for node in nodes)
    except TypeError:
        # raised below on all ranks: they wait in the exchange for this one
        given = InvalidType(MPI.ERR_ARG, f"nodes: expected the number of every rank's node, found {nodes!r}")
    by_rank = gather_or_raise(comm, given)
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        if other != first:
            raise InvalidArgument(MPI.ERR_ARG, f"nodes: {first} on rank 0, but {other} on rank {rank}")
    if first is not None and len(first) != len(by_rank):
        raise InvalidArgument(MPI.ERR_ARG, f"nodes: expected a number for each of {len(by_rank)} ranks, found {first}")
    return first


TRANSFERS = ("staged", "pinned", "kernel")
"""Transfers of GPU arrays that a user may ask for, from the slowest."""


def agree_on_gpu(comm: MPI.Intracomm, transfer: str) -> str:
    """Return the least of `TRANSFERS` that a rank passed. Raise on all ranks if one of them is invalid. Collective."""
    given: int | InvalidArgument
    try:
        given = TRANSFERS.index(transfer)
    except ValueError:
        given = InvalidArgument(MPI.ERR_ARG, f"gpu: expected one of {TRANSFERS}, found {transfer!r}")
    return TRANSFERS[min(gather_or_raise(comm, given))]


def agree_on_timeout(comm: MPI.Intracomm, timeout: float | None, variable: str) -> float | None:
    """Return the least time limit of all ranks, None if none has one. Raise on all if one is invalid. Collective.

    A rank that passes None takes ``CHORUS_TIMEOUT``, of the value `variable`.
    """
    given: float | InvalidInput | None
    try:
        if timeout is not None:
            given = seconds_of(timeout)
        else:
            given = seconds_of(_number(variable), "CHORUS_TIMEOUT") if variable.strip() else None
    except InvalidInput as invalid:
        given = invalid
    return min((one for one in gather_or_raise(comm, given) if one is not None), default=None)


def _number(text: str) -> float | str:
    """Number that a text denotes, else the text."""
    try:
        return float(text)
    except ValueError:
        return text


class Agreement(NamedTuple):
    """Settings of a communicator, equal on all ranks. Communicators that are made of it have them too."""

    threads: bool  #: all ranks may call MPI from several threads
    async_progress: bool
    checks: bool  #: debug mode
    aware: bool  #: arrays on GPUs are passed to MPI
    shared: bool  #: ranks of a node share memory if possible
    nodes: tuple[int, ...] | None  #: node of every rank, if given by the user
    gpu: str  #: best transfer of GPU arrays that may be used
    table: TimingTable | None
    timeout: float | None  #: seconds of waits without a time limit of their own

    def part(self, ranks: Sequence[int]) -> Agreement:
        """Settings of a communicator of these ranks."""
        return self if self.nodes is None else self._replace(nodes=tuple(self.nodes[rank] for rank in ranks))


class MemoryVisibility(NamedTuple):
    """Properties of a call, True only if they hold on all ranks: send buffers in shared memory, and in place."""

    shared: bool = False
    in_place: bool = False


UNKNOWN = MemoryVisibility()


def agree_on_memory(comm: MPI.Intracomm, node: NodeMemory | None, call: Call) -> MemoryVisibility:
    """Find out if all ranks send from shared memory, and if all are in place. False without mailboxes. Collective."""
    size = comm.Get_size()
    if node is None or size == 1:
        return UNKNOWN
    bits = common(comm, _is_shared(node, call, size) | call.in_place << 1)
    return MemoryVisibility(bool(bits & 1), bool(bits & 2))


def _is_shared(node: NodeMemory, call: Call, size: int) -> bool:
    """True if this rank sends only from its buffers in the call, and the node's other ranks have mapped all of them."""
    if not node.reads or call.copy_input or forwards_data(call.collective, size):
        return False
    ends = zip((call.source, call.target), buffer_spans(call), strict=True)
    return all(
        not staged(buffer) and node.heap.is_shared(buffer.address, span * call.unit.itemsize)
        for buffer, span in ends
        if buffer is not None and span
    )


class ChannelAllocator:
    """Allocator of mailbox channels for persistent requests: those behind the channels of other calls."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._used = NONBLOCKING
        self._returned: set[int] = set()

    def take(self) -> int | None:
        """Allocate a channel number, the same on all ranks. None if all are in use. Collective.

        Each channel is used once before the ranks agree on those that all have returned. A returned channel has no
        messages left, so the next request continues its sequence.
        """
        if self._used < CHANNELS - 1:
            self._used += 1
            return self._used
        common_bits = common(self._comm, sum(1 << channel for channel in self._returned))
        lowest = common_bits & -common_bits
        if not lowest:
            return None
        channel = lowest.bit_length() - 1
        self._returned.remove(channel)
        return channel

    def give_back(self, channel: int) -> None:
        """Mark a channel as free on this rank. No message on it may be active."""
        self._returned.add(channel)
