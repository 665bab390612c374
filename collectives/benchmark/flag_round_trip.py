"""Round trip of a flag between two ranks of a node: it shows whether their cores share a cache."""

import time

from mpi4py import MPI

from collectives import Communicator

TURNS = 2000


def flag_round_trip(comm: Communicator) -> float | None:
    """Seconds in which a flag goes from rank 0 to rank 1 and back, the least of many. Collective.

    None, on all ranks, if the two share no memory, or not every rank has a core of its own.
    """
    flag = comm.zeros(1, "i8")
    addresses = comm.allgather(MPI.Get_address(flag))
    node, peer = comm._open_planner().node, 1 - comm.Get_rank()
    least: float | None = None
    if node is not None and peer in (0, 1) and not node.shares_cores and node.reaches(peer):
        view = node.heap.peer_view(node.places[peer], addresses[peer], flag.nbytes)
        if view is not None:
            least = _exchange(flag.data, view.view(flag.dtype).data, first=peer == 1)
    least = comm.bcast(least)
    return least


def _exchange(mine: memoryview, theirs: memoryview, first: bool) -> float:
    least = float("inf")
    for turn in range(1, TURNS):
        start = time.perf_counter()
        if first:
            mine[0] = turn
        while theirs[0] != turn:
            pass
        if not first:
            mine[0] = turn
        least = min(least, time.perf_counter() - start)
    return least
