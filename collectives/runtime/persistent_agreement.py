"""What ranks agree on when a request is bound: a channel for it, and what they see of each other's arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.runtime.binding import reaches
from collectives.runtime.call import Call, staged
from collectives.runtime.requests import until
from collectives.selection.select import relays
from collectives.transport.mailbox import CHANNELS, Node


def common(comm: MPI.Intracomm, bits: int) -> int:
    """The bits that all ranks have set. Collective."""
    mine, everyone_s = np.array([bits]), np.zeros(1, np.int64)
    until(comm.Iallreduce(mine, everyone_s, MPI.BAND).Test)  # others may wait for what is under way here
    return int(everyone_s[0])


class Sight(NamedTuple):
    """What all ranks know of a call's memory.

    Attributes
    ----------
    seen : bool
        Neighbours see whatever is sent where it lies.
    in_place : bool
    """

    seen: bool = False
    in_place: bool = False


BLIND = Sight()
"""Where nobody asked, or nobody sees anything."""


def sight(comm: MPI.Intracomm, node: Node | None, call: Call) -> Sight:
    """What all ranks know of the memory of a call that is to be bound. Collective."""
    size = comm.Get_size()
    if node is None or size == 1:
        return BLIND
    both = common(comm, _shows(node, call, size) | (call.source is call.target) << 1)
    return Sight(bool(both & 1), bool(both & 2))


def _shows(node: Node, call: Call, size: int) -> bool:
    """Whether neighbours see all that this rank will send of a call, and may read what little they do not."""
    if not node.reads or call.snapshot or relays(call.collective, size):
        return False
    ends = zip((call.source, call.target), reaches(call), strict=True)
    return all(
        not staged(buffer) and node.heap.shows(buffer.address, span * call.unit.itemsize)
        for buffer, span in ends
        if buffer is not None and span
    )


class Channels:
    """The channels of the node's mailboxes that requests may have: all but the first, which blocking calls share.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks that bind requests together.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._used = 0
        self._returned: set[int] = set()

    def take(self) -> int | None:
        """A channel for one more request, the same on all ranks; None if all are in use. Collective.

        Each is used once before ranks ask each other which of them everyone has given back: whoever has done so has
        taken all messages that came there, so the next request goes on where the last one ended.
        """
        if self._used < CHANNELS - 1:
            self._used += 1
            return self._used
        everyone_s = common(self._comm, sum(1 << channel for channel in self._returned))
        lowest = everyone_s & -everyone_s
        if not lowest:
            return None
        channel = lowest.bit_length() - 1
        self._returned.remove(channel)
        return channel

    def give_back(self, channel: int) -> None:
        """A request is done with it: no message of it is under way."""
        self._returned.add(channel)
