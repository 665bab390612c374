"""Speed of messages between nodes, measured at the creation of a communicator."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.schedule.topology import Nodes

NBYTES, MEDIUM = 1 << 18, 1 << 15
"""Bytes of a long message, and of one that fits into the buffers of most networks."""

ROUND_TRIPS = 9
"""Round trips of a short and of a medium message, each after a barrier, as messages of a call mostly come after a
pause. The median counts, as a collective takes as long as its slowest messages."""

LONG_ROUND_TRIPS = 5
"""Round trips of a long message in a row. The first two use up the burst. The median of the others counts."""

BARRIERS = 5
"""Barriers in a row, whose median counts."""

BURST_RATIO = 2
"""A network sends the first bytes in a burst if a byte of a long message takes at least this many times as long."""


class NetworkSpeed(NamedTuple):
    """Seconds of messages between two nodes. 0 if not measured.

    Networks with limited rates (cloud machines, emulated ones) send up to `burst` bytes faster after a pause.
    """

    message: float = 0.0  #: of a short message
    byte: float = 0.0  #: per byte of long messages
    burst_byte: float = 0.0  #: per byte within a burst
    burst: float = 0.0  #: bytes of a burst, or 0 if all bytes take equally long
    barrier: float = 0.0  #: of MPI's barrier of all ranks


def measure(comm: MPI.Intracomm, nodes: Nodes) -> NetworkSpeed:
    """Measure messages between the first ranks of nodes 0 and 1, 2 and 3, and so on, all pairs at once. Collective.

    Returns the slowest pair's values, with the shortest burst, on all ranks. A node without a partner only waits.
    """
    rank, count = comm.Get_rank(), len(set(nodes))
    leaders = [nodes.index(node) for node in range(count)]
    partner = nodes[rank] ^ 1
    leads = rank == leaders[nodes[rank]] and partner < count
    peer = leaders[partner] if leads else None
    short, medium, long = (np.zeros(n, np.uint8) for n in (1, MEDIUM, NBYTES))
    shorts: list[float] = []
    mediums: list[float] = []
    barriers: list[float] = []
    comm.Barrier()  # ranks arrive at different times
    for _ in range(BARRIERS):
        start = time.perf_counter()
        comm.Barrier()
        barriers.append(time.perf_counter() - start)
    for _ in range(ROUND_TRIPS):
        for there, taken in ((short, shorts), (medium, mediums)):
            comm.Barrier()
            taken.append(_round_trip(comm, peer, there, short))
    longs = [_round_trip(comm, peer, long, short) for _ in range(LONG_ROUND_TRIPS)]
    seconds = np.array([0.0, 0.0, 0.0, -np.inf, np.median(barriers)])  # of the burst the negative, whose maximum counts
    if peer is not None and rank < peer:  # the other rank's times begin before or after a message arrives
        both = np.median(shorts)
        longs = [max(0.0, one - both) for one in longs]
        byte, burst_byte = np.median(longs[2:]) / NBYTES, max(0.0, np.median(mediums) - both) / MEDIUM
        seconds[:4] = both / 2, byte, burst_byte, -_burst(longs, byte, burst_byte)
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    seconds[3] *= -1
    return NetworkSpeed(*seconds.tolist())


def _burst(longs: list[float], byte: float, burst_byte: float) -> float:
    """Bytes sent in a burst, by the time that the first long messages took less than the others."""
    if not burst_byte or byte < BURST_RATIO * burst_byte:
        return 0.0
    saved = sum(max(0.0, byte * NBYTES - one) for one in longs)
    return min(saved / (byte - burst_byte), float(len(longs) * NBYTES))


def _round_trip(comm: MPI.Intracomm, peer: int | None, there: np.ndarray, back: np.ndarray) -> float:
    """Seconds of the message `there` from the lower rank of a pair, answered by the message `back`.

    0 without a peer.
    """
    if peer is None:
        return 0.0
    start = time.perf_counter()
    if comm.Get_rank() < peer:
        comm.Send(there, peer)
        comm.Recv(back, peer)
    else:
        comm.Recv(there, peer)
        comm.Send(back, peer)
    return time.perf_counter() - start
