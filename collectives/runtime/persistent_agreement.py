"""Agreement when binding a persistent request: channel, and whether buffers are in shared memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.runtime.binding import buffer_spans
from collectives.runtime.call import Call, staged
from collectives.runtime.progress import progress_until
from collectives.selection.select import forwards_data
from collectives.transport.mailbox import CHANNELS, NodeMemory


def common(comm: MPI.Intracomm, bits: int) -> int:
    """Bits that all ranks have set. Collective."""
    mine, common_bits = np.array([bits]), np.zeros(1, np.int64)
    progress_until(
        comm.Iallreduce(mine, common_bits, MPI.BAND).Test
    )  # others may wait for active requests of this rank
    return int(common_bits[0])


class MemoryVisibility(NamedTuple):
    """Memory properties of a call that hold on all ranks; `shared`: peers of the node can read all memory sent from."""

    shared: bool = False
    in_place: bool = False


UNKNOWN = MemoryVisibility()


def agree_on_memory(comm: MPI.Intracomm, node: NodeMemory | None, call: Call) -> MemoryVisibility:
    """Memory properties of a call that hold on all ranks. Collective."""
    size = comm.Get_size()
    if node is None or size == 1:
        return UNKNOWN
    bits = common(comm, _is_shared(node, call, size) | call.in_place << 1)
    return MemoryVisibility(bool(bits & 1), bool(bits & 2))


def _is_shared(node: NodeMemory, call: Call, size: int) -> bool:
    """True if peers can read all memory that this rank sends from."""
    if not node.reads or call.copy_input or forwards_data(call.collective, size):
        return False
    ends = zip((call.source, call.target), buffer_spans(call), strict=True)
    return all(
        not staged(buffer) and node.heap.shows(buffer.address, span * call.unit.itemsize)
        for buffer, span in ends
        if buffer is not None and span
    )


class ChannelAllocator:
    """Channels of the node's mailboxes for persistent requests: all but the first, which blocking calls share."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._used = 0
        self._returned: set[int] = set()

    def take(self) -> int | None:
        """A channel for a new request, the same on all ranks; None if all are in use. Collective.

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
        """Return a channel on which no message is active."""
        self._returned.add(channel)
