"""Expected time of a call at the speeds that were measured when its communicator was created.

The choice of an algorithm compares rounded costs, so that most launches on one machine make the same choice. It leaves
out costs that all algorithms have in common. The time of a call needs all of them:

- Within a node ranks copy the bytes of messages themselves. If neither rank has another message in the round, each
  copies half of it. A rank that sends and receives copies all that it receives. Out of place, a rank copies the blocks
  that it keeps.
- Messages up to `ONE_COPY` are combined directly from the bounce buffer. Longer ones are received first and then
  combined, so they are read again.
- Calls of up to the bytes of a network's burst are sent at its rate. Longer ones at the lower rate, as one call after
  another finds the burst used up (`NetworkSpeed`).
- Between emulated nodes that share cores, bytes take their time on the network or on the cores, whichever is longer.
  If rank 0 waits for others, every rank must have been scheduled once. That takes as long as a barrier.
"""

from __future__ import annotations

from itertools import chain
from math import inf
from typing import NamedTuple

from collectives.algorithms import catalog
from collectives.analysis.cost_functions import (
    ClusteredNetwork,
    LinearCost,
    PiecewiseCost,
    SharedCardCost,
    UniformNetwork,
)
from collectives.analysis.simulate import price
from collectives.schedule.chunks import ChunkLayout, even
from collectives.schedule.semantics import after, before, vector
from collectives.schedule.steps import Copy, Reduce, Schedule, Send, numbers
from collectives.schedule.topology import Nodes
from collectives.selection.cost_model import BUILT_IN, CALL, NETWORK_OVERHEAD
from collectives.selection.select import SIMULATED_RANKS, formula
from collectives.selection.shared_cores import CACHED_BYTES, NETWORK_COPY, NETWORK_WORK, UNCACHED, total_work
from collectives.transport.memory.copy_speed import MessageSpeed
from collectives.transport.mpi.network_speed import NetworkSpeed
from collectives.transport.node.mailbox import ONE_COPY

CROSSING = 0.15e-6
"""Extra seconds of a message if one of its ranks also sends or receives the other way."""

MOST_RANKS = 16
"""Largest number of ranks simulated. Larger simulations are slow."""

LONGEST = 1 << 40
"""Bytes up to which costs of messages are defined. No call is longer."""


class MeasuredSpeed(NamedTuple):
    """Speeds of messages within nodes and between them, as measured on the ranks of a communicator."""

    message: MessageSpeed = MessageSpeed()
    network: NetworkSpeed = NetworkSpeed()


class TimedCall(NamedTuple):
    """Arguments of a prediction: algorithm and segments, ranks, bytes (see `CallTraits`), and whether in place."""

    collective: str
    algorithm: str
    segments: int
    size: int
    nbytes: int
    in_place: bool = False

    @property
    def layout(self) -> ChunkLayout:
        """Lengths of the chunks in bytes."""
        blocks = catalog.blocks(self.collective, self.algorithm, self.size)
        everywhere = self.nbytes * blocks // vector(self.collective, self.size, blocks)
        return ChunkLayout.packed(even(everywhere, blocks * self.segments))


def expected_seconds(call: TimedCall, nodes: Nodes | None, cores: int | None, speed: MeasuredSpeed) -> float | None:
    """Seconds of a call with root 0. `Selector` describes `nodes` and `cores`.

    None if speeds were not measured, nodes have several ranks each, or one node has more than `MOST_RANKS` ranks or
    fewer cores than ranks.
    """
    if nodes is None:
        return within_node(call, speed.message) if cores is None and call.size <= MOST_RANKS else None
    alike = len(set(nodes)) == len(nodes) <= SIMULATED_RANKS
    return between_nodes(call, speed.network, cores) if alike else None


def within_node(call: TimedCall, speed: MessageSpeed) -> float | None:
    """Seconds of a call within a node whose ranks have a core each. None if its speed is unknown."""
    cell = speed.write + speed.read  # seconds of a byte through a bounce buffer
    byte = min(cell, speed.by_address)
    if not (0 < byte < inf and 0 < speed.round_trip < inf):
        return None
    byte, adding = (each * (UNCACHED if call.nbytes > CACHED_BYTES else 1) for each in (byte, speed.read))
    flight = speed.round_trip / 2
    lengths = (0, ONE_COPY, 4 * ONE_COPY, LONGEST)
    through_cell = ONE_COPY * cell
    alone = PiecewiseCost(
        lengths, tuple(flight + s for s in (0, through_cell, *(max(through_cell, n * byte / 2) for n in lengths[2:])))
    )
    messages = SharedCardCost(alone, LinearCost(flight + CROSSING, byte))
    lengths = (0, ONE_COPY, ONE_COPY + 1, LONGEST)
    reductions = PiecewiseCost(lengths, (0, 0, ONE_COPY * adding, LONGEST * adding))
    network = ClusteredNetwork((0,) * call.size, messages, messages, reductions)
    schedules = catalog.build_all(call.collective, call.algorithm, call.size, 0, call.segments)
    finish = price(schedules, call.layout, 1, network).finish
    copied = zip(schedules, kept_bytes(call, schedules), strict=True)
    own = [speed.write * kept / (2 if _one_way(schedule) else 1) for schedule, kept in copied]
    late = speed.late if total_work(call.collective, call.algorithm, call.size).of_first else 0.0
    return CALL + late + max(float(end) + copy for end, copy in zip(finish, own, strict=True))


def _one_way(schedule: Schedule) -> bool:
    """True if a rank only sends or only receives, so that its peer copies messages while it copies its own block."""
    return len({isinstance(step, Send) for step in chain.from_iterable(schedule)}) < 2


def kept_bytes(call: TimedCall, schedules: list[Schedule]) -> list[int]:
    """Bytes of every rank's input that its result contains unchanged. A call that is not in place must copy them."""
    if call.collective == "broadcast" or call.in_place:  # one buffer for input and result
        return [0] * call.size
    layout, blocks = call.layout, catalog.blocks(call.collective, call.algorithm, call.size)
    kept = []
    for rank, schedule in enumerate(schedules):
        place = call.collective, rank, call.size, 0, call.segments, blocks
        chunks = set(before(*place)) & after(*place).keys()
        for step in chain.from_iterable(schedule):
            if not isinstance(step, Send):
                chunks.difference_update(numbers(step.target if isinstance(step, (Reduce, Copy)) else step.chunks))
        kept.append(layout.length(tuple(range(chunk, chunk + 1) for chunk in chunks)))
    return kept


def between_nodes(call: TimedCall, speed: NetworkSpeed, cores: int | None) -> float | None:
    """Seconds of a call between nodes of one rank each. Emulated nodes share `cores`. None if unknown."""
    if not (speed.message > 0 and speed.byte > 0):
        return None
    alpha, overhead = speed.message, speed.message * NETWORK_OVERHEAD
    # the part of alpha that is core time is counted below, on the shared cores
    if cores is not None:
        alpha, overhead = (1 - NETWORK_WORK) * alpha, 0.0
    entry, work = catalog.find(call.collective, call.algorithm), total_work(call.collective, call.algorithm, call.size)
    latency = _by_formula(call._replace(nbytes=0), UniformNetwork(alpha, 0.0, 0.0, overhead))
    sent = call.nbytes * float(catalog.evaluate(entry.volume, call.size, call.segments if entry.cuts else 1))
    byte = speed.burst_byte if sent <= speed.burst else speed.byte
    moved = _by_formula(call, UniformNetwork(0.0, byte, 0.0))
    combined = _by_formula(call, UniformNetwork(0.0, 0.0, BUILT_IN.network.gamma))
    if cores is not None:
        latency += NETWORK_WORK * speed.message * work.messages * call.segments / cores
        latency = max(latency, speed.barrier) if work.of_first else latency
        moved = max(moved, NETWORK_COPY * work.moved * call.nbytes / cores)
    return CALL + latency + moved + combined


def _by_formula(call: TimedCall, wire: UniformNetwork) -> float:
    return formula(call.collective, call.algorithm, call.size, call.nbytes, call.segments, wire)
