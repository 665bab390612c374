"""Cost of a collective among more ranks than cores: the work of all ranks, divided by the cores.

Where ranks take turns on the cores, a rank that waits costs nothing, but one that goes on must first be scheduled.
Messages and reductions of different ranks do not overlap, so their total counts, and segments bring no gain.
The constants fit measurements of four ranks on two cores.
"""

from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from collectives.algorithms import catalog
from collectives.schedule.semantics import vector
from collectives.schedule.steps import Chunks, Recv, RecvReduce, Reduce, Send

RESUME = 4.5e-6
"""Seconds of core time for a rank to go on after a round in which it waited for a message."""

SWITCH = 2e-6
"""Seconds per round of the longest path, however many cores there are."""

BETA, GAMMA = 0.4e-9, 0.05e-9
"""Seconds to move a byte to another rank, and to combine a byte."""


class TotalWork(NamedTuple):
    """Work of all ranks of a schedule: rounds in which they receive, and vectors that they move and combine."""

    waits: int
    moved: float
    combined: float


@lru_cache(maxsize=1024)
def total_work(collective: str, name: str, size: int) -> TotalWork:
    """Work of all ranks of an algorithm that does not use the topology; bytes as parts of the whole vector.

    >>> total_work("allreduce", "recursive_doubling", 4), total_work("scatter", "linear", 4)
    (TotalWork(waits=8, moved=8.0, combined=8.0), TotalWork(waits=3, moved=0.75, combined=0.0))
    """
    rounds = list(chain.from_iterable(catalog.build_all(collective, name, size)))
    waits, moved, combined = 0, 0, 0
    for steps in rounds:
        waits += any(isinstance(step, (Recv, RecvReduce)) for step in steps)
        moved += sum(_count(step.chunks) for step in steps if isinstance(step, Send))
        combined += sum(_count(step.chunks) for step in steps if isinstance(step, RecvReduce))
        combined += sum(_count(step.source) for step in steps if isinstance(step, Reduce))
    whole = vector(collective, size, catalog.blocks(collective, name, size))
    return TotalWork(waits, moved / whole, combined / whole)


def _count(chunks: Chunks) -> int:
    return sum(map(len, chunks))


def predict_on_shared_cores(collective: str, name: str, size: int, nbytes: int, cores: int) -> float:
    """Predicted seconds of an algorithm, without segments, among `size` ranks of one node that share `cores` cores."""
    entry, work = catalog.find(collective, name), total_work(collective, name, size)
    rounds, moved, combined = (
        float(catalog.evaluate(each, size))
        for each in (entry.rounds, entry.beta or entry.volume, entry.gamma or entry.combined)
    )
    latency = max(RESUME * work.waits / cores, SWITCH * rounds)
    bandwidth = BETA * max(moved, work.moved / cores) + GAMMA * max(combined, work.combined / cores)
    return latency + nbytes * bandwidth
