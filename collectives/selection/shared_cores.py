"""Cost of a collective among more ranks than cores: the work of all ranks, divided by the cores.

Ranks take turns on the cores. A waiting rank costs nothing, but it must be scheduled before it continues. It
waits once for all messages that may be under way at the same time. Messages and reductions of different ranks rarely
overlap, so their total counts, and segments bring no gain. A part of the critical path is added, since cores are idle
where only one rank has work. If rank 0 waits for others, all of them must have had a turn before it goes on. Data that
exceeds the caches takes longer. The constants fit measurements of four ranks on two cores.

The ranks of emulated nodes share cores. Each message and byte takes core time at both ends, a part of alpha and
beta. The rest is waiting time on the critical path.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from collectives.algorithms import catalog
from collectives.analysis.cost_functions import UniformNetwork
from collectives.analysis.matching import causal_levels
from collectives.schedule.semantics import vector
from collectives.schedule.steps import Chunks, RecvReduce, Reduce, Schedule, Send

TURN = 16e-6
"""Seconds until all ranks have had a turn, measured with four ranks on two cores."""

RESUME = 1.4e-6
"""Seconds of core time for a rank to go on after it waited for messages."""

MESSAGE = 0.1e-6
"""Seconds of core time per message, sent and received."""

BETA, GAMMA = 0.19e-9, 0.07e-9
"""Seconds of core time to move a byte to another rank, and to combine a byte."""

CACHED_BYTES, UNCACHED = 1 << 22, 1.3
"""Largest call, in bytes, whose data fits into the caches, and the factor of BETA and GAMMA for longer ones."""

CRITICAL = 0.25
"""Share of the bytes on the critical path that is added."""


NETWORK_WORK, NETWORK_COPY = 0.55, 0.8e-9
"""Core time of a message between nodes, as a share of alpha, and seconds of core time to move a byte. Fit measurements
of four nodes on two cores, over TCP."""


class TotalWork(NamedTuple):
    """Work of all ranks of a schedule: waits, waits of rank 0, messages, vectors moved and combined.

    `exchanged`: vectors that go both ways between two ranks in one round.
    """

    waits: int
    of_first: int
    messages: int
    moved: float
    combined: float
    exchanged: float = 0.0


@lru_cache(maxsize=1024)
def total_work(collective: str, name: str, size: int) -> TotalWork:
    """Work of all ranks of an algorithm that does not use the topology. Bytes as parts of the whole vector.

    >>> total_work("allreduce", "recursive_doubling", 4)
    TotalWork(waits=8, of_first=2, messages=8, moved=8.0, combined=8.0, exchanged=8.0)
    >>> total_work("scatter", "linear", 4)
    TotalWork(waits=3, of_first=0, messages=3, moved=0.75, combined=0.0, exchanged=0.0)
    """
    schedules, blocks = catalog.build_all(collective, name, size), catalog.blocks(collective, name, size)
    steps = list(chain.from_iterable(chain.from_iterable(schedules)))
    sends = [_count(step.chunks) for step in steps if isinstance(step, Send)]
    combined = sum(_count(step.chunks) for step in steps if isinstance(step, RecvReduce))
    combined += sum(_count(step.source) for step in steps if isinstance(step, Reduce))
    whole, waits = vector(collective, size, blocks), [rank for rank, _ in causal_levels(schedules)]
    exchanged = _exchanged(schedules) / whole
    return TotalWork(len(waits), waits.count(0), len(sends), sum(sends) / whole, combined / whole, exchanged)


def _exchanged(schedules: Sequence[Schedule]) -> int:
    """Chunks of messages that go both ways between two ranks in one round."""
    sent: defaultdict[tuple[int, int, int], int] = defaultdict(int)
    for rank, schedule in enumerate(schedules):
        for number, steps in enumerate(schedule):
            for step in steps:
                if isinstance(step, Send):
                    sent[number, rank, step.peer] += _count(step.chunks)
    return sum(chunks for (number, rank, peer), chunks in sent.items() if (number, peer, rank) in sent)


def _count(chunks: Chunks) -> int:
    return sum(map(len, chunks))


def without_core_time(wire: UniformNetwork) -> UniformNetwork:
    """Costs of a message between emulated nodes without its core time. A small beta does not contain core time."""
    alpha, beta = (1 - NETWORK_WORK) * wire.alpha, max(wire.beta - NETWORK_COPY, min(wire.beta, NETWORK_COPY))
    return wire._replace(alpha=alpha, beta=beta, overhead=0.0)


def core_time(collective: str, name: str, size: int, nbytes: int, segments: int, wire: UniformNetwork) -> float:
    """Core time of all messages between emulated nodes. `without_core_time` describes `wire`."""
    work = total_work(collective, name, size)
    per_message = wire.alpha * NETWORK_WORK / (1 - NETWORK_WORK)
    return per_message * work.messages * segments + NETWORK_COPY * work.moved * nbytes


def predict_on_shared_cores(collective: str, name: str, size: int, nbytes: int, cores: int) -> float:
    """Predicted seconds of an algorithm, without segments, among `size` ranks of one node that share `cores` cores."""
    entry, work = catalog.find(collective, name), total_work(collective, name, size)
    formulas = entry.beta or entry.volume, entry.gamma or entry.combined
    moved, combined = (float(catalog.evaluate(each, size)) for each in formulas)
    latency = (RESUME * work.waits + MESSAGE * work.messages) / cores + (TURN if work.of_first else 0.0)
    bandwidth = BETA * (work.moved / cores + CRITICAL * moved) + GAMMA * (work.combined / cores + CRITICAL * combined)
    return latency + nbytes * bandwidth * (UNCACHED if nbytes > CACHED_BYTES else 1.0)
