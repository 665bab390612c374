"""Measurement of message costs between pairs of ranks, and prediction of a collective's time from them.

Four collectives of two ranks suffice: a broadcast is one message, a reduction is one combined message, an allgather in
place a message each way, and an allreduce by recursive doubling a combined message each way. They run in the memory
and by the rules of the race: new data before every call, the slowest rank's time counts.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.algorithms import catalog
from collectives.analysis.cost_functions import ClusteredNetwork, EdgeCost, LinearCost, PiecewiseCost, SharedCardCost
from collectives.analysis.simulate import price
from collectives.benchmark.cases import CASES, DTYPES, CaseBuffers
from collectives.benchmark.timing import Contestant, make_call, race
from collectives.selection.expected_time import TimedCall, kept_bytes

LENGTHS = (8, 1 << 10, 1 << 13, *(1 << power for power in range(15, 40)))
"""Bytes of the messages that are timed, up to the longest that the race can have."""

SWEEPS = 3
"""Sweeps over all lengths. The fastest sweep's median counts: a disturbance only adds time."""

PROBES = (
    ("broadcast", "mst", 1, False),
    ("reduce", "mst", 1, False),
    ("allgather", "circulant", 2, True),
    ("allreduce", "recursive_doubling", 1, False),
)
"""Probes of two ranks: collective, algorithm, vectors per message, whether in place.

They time messages one way, one way and combined, both ways, both ways and combined."""


class CalibratedCosts(NamedTuple):
    """Cost functions measured in this run: of messages between ranks, and of copying a rank's own block."""

    network: ClusteredNetwork
    copy: EdgeCost


def lengths(largest: int) -> list[int]:
    """Message lengths to time, in bytes: from 8 up to the first length that is at least `largest`.

    >>> lengths(40_000)
    [8, 1024, 8192, 32768, 65536]
    """
    return [length for length, shorter in zip(LENGTHS, (0, *LENGTHS), strict=False) if shorter < max(largest, 8)]


def calibrate(
    plain: MPI.Intracomm,
    comm: Any,
    memory: str,
    mode: str,
    largest: int,
    seconds: float = 0.1,
    tick: Callable[[], object] = lambda: None,
) -> CalibratedCosts:
    """Measure costs of messages within and between nodes, and of copies. Collective. Equal result on all ranks.

    All pairs of a kind run at once. `memory` and `mode` may decide the transport of messages. Messages have the
    lengths of `lengths(largest)`. `seconds` is the time per length, probe and sweep. `tick` is called after every
    length.
    """
    rank, nodes = plain.Get_rank(), comm.nodes or (0,) * plain.Get_size()
    node, at = nodes[rank], lengths(largest)
    place = nodes[:rank].count(node)

    def curves(pair: tuple[int, int]) -> tuple[EdgeCost, EdgeCost]:
        """Least costs of a message and of its reduction over all pairs. Collective. Equal `pair` on a pair's ranks."""
        color = sorted(set(plain.allgather(pair))).index(pair)
        two, mine = comm.Split(color, rank), MPI.Intracomm(plain.Split(color, rank))
        sweeps = []  # several, so that a disturbance of the machine affects one of them only
        for _ in range(SWEEPS):
            sweep: list[list[float] | None] = []
            for length in at:
                sweep.append(_probe(mine, two, memory, mode, length, seconds) if mine.Get_size() == 2 else None)
                tick()
            sweeps.append(sweep)
        mine.Free()
        two.Free()
        measured = [sweep for those in plain.allgather(sweeps) for sweep in those if sweep[0] is not None]
        alone, added, both, both_added = np.min(measured or np.zeros((1, len(at), len(PROBES))), axis=0).T

        def cost(*seconds: np.ndarray) -> EdgeCost:
            return SharedCardCost(*(PiecewiseCost(tuple(at), tuple(np.maximum(s, 0.0).tolist())) for s in seconds))

        return cost(alone, both), cost(added - alone, both_added - both)

    inside = curves((node, place // 2))
    between: tuple[EdgeCost, EdgeCost] = (LinearCost(0.0, 0.0), LinearCost(0.0, 0.0))
    if comm.nodes:
        between = curves((node // 2, -1) if place == 0 else (-1 - rank, 0))
    adding = inside[1] if len(set(nodes)) < len(nodes) else between[1]
    return CalibratedCosts(ClusteredNetwork(tuple(nodes), inside[0], between[0], adding), _copies(plain, at))


def _probe(
    plain: MPI.Intracomm, comm: MPI.Intracomm, memory: str, mode: str, length: int, seconds: float
) -> list[float]:
    contestants, kind = [], DTYPES["float32"]
    for collective, algorithm, vectors, in_place in PROBES:
        case = CASES[collective]
        buffers = CaseBuffers(case, comm, vectors * length // kind.itemsize, kind, memory, in_place)
        call, close = make_call(comm, case.method, mode, buffers.args, {"algorithm": algorithm})
        contestants.append(Contestant(collective, buffers, call, close))
    timings = race(plain, contestants, iterations=200, warmup=10, seconds=seconds)
    for one in contestants:
        one.close()
    return [timing.median / 1e6 for timing in timings]


def _copies(plain: MPI.Intracomm, at: Sequence[int]) -> PiecewiseCost:
    """Measure the cost of copying arrays of each length in `at` (bytes), on all ranks at once. The slowest counts."""
    found = []
    for length in at:
        source, target = np.ones(length, np.uint8), np.ones(length, np.uint8)
        spans = []
        for _ in range(5):
            source += 1
            plain.Barrier()
            began = time.perf_counter()
            np.copyto(target, source)
            spans.append(time.perf_counter() - began)
        found.append(float(np.median(spans)))
    slowest = np.max(plain.allgather(found), axis=0)
    return PiecewiseCost(tuple(at), tuple(slowest.tolist()))


def predicted_us(
    costs: CalibratedCosts,
    collective: str,
    algorithm: str,
    size: int,
    nbytes: int,
    segments: int = 1,
    in_place: bool = False,
) -> float:
    """Predicted microseconds of one call with root 0 on an array of `nbytes` bytes in total.

    `in_place`: ranks have their own blocks at their places, so that no block is copied.
    """
    call = TimedCall(collective, algorithm, segments, size, nbytes, in_place)
    schedules = catalog.build_all(collective, algorithm, size, 0, segments, costs.network.nodes)
    finish = price(schedules, call.layout, 1, costs.network).finish
    kept = zip(finish, kept_bytes(call, schedules), strict=True)
    return 1e6 * max(end + float(costs.copy(own)) * (own > 0) for end, own in kept)
