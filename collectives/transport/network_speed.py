"""Speed of messages between nodes, measured at the creation of a communicator."""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.schedule.topology import Nodes

NBYTES = 1 << 18
"""Bytes of a long message."""

ROUND_TRIPS = 9
"""Round trips of a short message, and half as many of a long one that a short one answers. The median counts, as
networks deliver some of the bytes out of their buffers, and a collective takes as long as its slowest messages."""


class NetworkSpeed(NamedTuple):
    """Seconds of a message between two nodes: of a short one, and per byte of a long one; 0 if not measured."""

    message: float = 0.0
    byte: float = 0.0


def measure(comm: MPI.Intracomm, nodes: Nodes) -> NetworkSpeed:
    """Measure messages between the first ranks of nodes 0 and 1, 2 and 3, and so on, all pairs at once. Collective.

    Returns the slowest pair's values on all ranks. A node without a partner only waits.
    """
    rank, count = comm.Get_rank(), len(set(nodes))
    leaders = [nodes.index(node) for node in range(count)]
    partner = nodes[rank] ^ 1
    seconds = np.zeros(2)
    comm.Barrier()  # ranks arrive at different times
    if rank == leaders[nodes[rank]] and partner < count:
        short, long = np.zeros(1, np.uint8), np.zeros(NBYTES, np.uint8)
        one_way = median(_round_trips(comm, leaders[partner], short, short, ROUND_TRIPS)) / 2
        both = median(_round_trips(comm, leaders[partner], long, short, ROUND_TRIPS // 2))
        if rank < leaders[partner]:  # the other rank's times begin before or after a message arrives
            seconds[:] = one_way, max(0.0, both - 2 * one_way) / NBYTES
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return NetworkSpeed(*seconds.tolist())


def _round_trips(comm: MPI.Intracomm, peer: int, there: np.ndarray, back: np.ndarray, times: int) -> list[float]:
    """Seconds of each round trip: a message `there` of the lower rank, answered by one `back`."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        if comm.Get_rank() < peer:
            comm.Send(there, peer)
            comm.Recv(back, peer)
        else:
            comm.Recv(there, peer)
            comm.Send(back, peer)
        taken.append(time.perf_counter() - start)
    return taken
