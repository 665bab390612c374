"""Simulated completion times of schedules, message by message.

The costs of messages and of combining are the network's, see `cost_functions`. Copies cost nothing.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from collectives.analysis.cost_functions import CostFunctions
from collectives.analysis.matching import Partners, ScheduleLocation, causal_order, match
from collectives.schedule.chunks import ChunkLayout
from collectives.schedule.steps import Chunks, Recv, RecvReduce, Reduce, Schedule, Send


class SimulatedTime(NamedTuple):
    """Completion time of each rank, in seconds from a common start."""

    finish: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Time until the last rank is done."""
        return max(self.finish)


def price(
    schedules: Sequence[Schedule],
    layout: ChunkLayout,
    itemsize: int,
    network: CostFunctions,
    partners: Partners | None = None,
) -> SimulatedTime:
    """Simulate the schedules of all ranks, each with one send port and one receive port. Return completion times.

    A message starts when both its ranks have reached its round and its two ports are free. Of several ready messages,
    the first one listed starts. What a round combines is combined when its messages have arrived. Copies cost nothing.
    ScheduleError if a message has no partner, or the ranks deadlock.

    Parameters
    ----------
    schedules : sequence of Schedule
        One per rank.
    layout : ChunkLayout
        Lengths of the chunks, in elements of `itemsize` bytes.
    network : CostFunctions
        Costs per edge, and the ranks that share a card.
    partners : mapping, optional
        What `match` returns for the schedules, if it is known.
    """
    if partners is None:
        partners = match(schedules, len(layout.lengths))
    run = _ScheduleRun(schedules, partners, network, _weigher(layout, itemsize))
    for rank in range(len(schedules)):
        run.begin(rank)
    run.finished = list(run.clock)
    while run.ready:
        run.deliver()
    if any(run.open_messages):
        deque(causal_order(schedules, run.partners), maxlen=0)  # raises the error that names the ranks that wait
    return SimulatedTime(tuple(run.clock))


class _ScheduleRun:
    """State of a simulation: each rank's clock, round and ports, and the queue of messages that are ready to start."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        partners: Partners,
        network: CostFunctions,
        weigh: Callable[[Chunks], int],
    ) -> None:
        size = len(schedules)
        self.schedules, self.partners, self.network, self.weigh = schedules, partners, network, weigh
        self.meets = {**partners, **{send: receive for receive, send in partners.items()}}
        self.sharers = _sharers(self.partners, network.cards)
        ends = self.partners.values(), self.partners
        self.sends, self.receives = ({(spot.rank, spot.round) for spot in spots} for spots in ends)
        self.clock = [0.0] * size  # of each rank: when its last round ended
        self.finished = [0.0] * size  # when the messages of the current round have ended
        self.out, self.into = [0.0] * size, [0.0] * size  # when its ports are free again
        self.current = [-1] * size  # the round that it is in
        self.open_messages = [0] * size  # of that round
        self.ready: list[tuple[float, int, int, ScheduleLocation]] = []  # sends: earliest start, step, rank, place

    def begin(self, rank: int) -> None:
        """Advance a rank to its next round with messages. Queue those whose other rank has reached their round."""
        clock, current, schedule = self.clock, self.current, self.schedules[rank]
        while current[rank] + 1 < len(schedule):
            current[rank] += 1
            index, steps = current[rank], schedule[current[rank]]
            messages = [i for i, step in enumerate(steps) if isinstance(step, (Send, Recv, RecvReduce))]
            self.open_messages[rank] = len(messages)
            for position in messages:
                spot = ScheduleLocation(rank, index, position)
                other = self.meets[spot]
                if current[other.rank] == other.round:
                    send = spot if isinstance(steps[position], Send) else other
                    heappush(self.ready, (max(clock[rank], clock[other.rank]), send.step, send.rank, send))
            if messages:
                return
            self.combine(rank)

    def combine(self, rank: int) -> None:
        index = self.current[rank]
        for step in self.schedules[rank][index]:
            if isinstance(step, (RecvReduce, Reduce)):
                chunks = step.chunks if isinstance(step, RecvReduce) else step.source
                both = isinstance(step, RecvReduce) and (rank, index) in self.sends
                self.clock[rank] += self.network.combine(self.weigh(chunks), both)

    def deliver(self) -> None:
        """Simulate the first message of the queue, or requeue it if a port is busy. Advance ranks whose round ends."""
        earliest, place, rank, send = heappop(self.ready)
        receive = self.meets[send]
        start = max(earliest, self.out[rank], self.into[receive.rank])
        if start > earliest:
            heappush(self.ready, (start, place, rank, send))
            return
        chunks = self.schedules[rank][send.round][send.step].chunks  # type: ignore[union-attr]
        both = (rank, send.round) in self.receives or (receive.rank, receive.round) in self.sends
        flight = self.network.message(rank, receive.rank, self.weigh(chunks) * self.sharers.get(send, 1), both)
        end = self.out[rank] = self.into[receive.rank] = start + flight
        for one in (rank, receive.rank):
            self.finished[one] = max(self.finished[one], end)
            self.open_messages[one] -= 1
            if not self.open_messages[one]:
                self.clock[one] = self.finished[one]
                self.combine(one)
                self.finished[one] = self.clock[one]
                self.begin(one)


def _sharers(partners: Partners, nodes: Sequence[int] | None) -> dict[ScheduleLocation, int]:
    """Map each inter-node send to the number of shares (`ClusteredNetwork.cards`) of its busier network card."""
    if nodes is None:
        return {}
    crossing = [(s, r) for r, s in partners.items() if nodes[s.rank] != nodes[r.rank]]
    users: dict[tuple[int, int, bool], tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))

    def cards(send: ScheduleLocation, receive: ScheduleLocation) -> list[tuple[int, int, bool]]:
        """Network cards at both ends of a message in its rounds: (node, round, True if data comes in)."""
        return [(nodes[send.rank], send.round, False), (nodes[receive.rank], receive.round, True)]

    for send, receive in crossing:
        for card in cards(send, receive):
            senders, receivers = users[card]
            senders.add(send.rank)
            receivers.add(receive.rank)
    flows = {card: min(len(senders), len(receivers)) for card, (senders, receivers) in users.items()}
    return {send: max(flows[card] for card in cards(send, receive)) for send, receive in crossing}


def _weigher(layout: ChunkLayout, itemsize: int) -> Callable[[Chunks], int]:
    """Function that maps chunks to their bytes, by prefix sums of chunk lengths."""
    count = len(layout.lengths)
    sums = [0, *accumulate(layout.lengths)]

    def upto(chunk: int) -> int:
        laps, chunk = divmod(chunk, count)
        return laps * sums[-1] + sums[chunk]

    return lambda chunks: itemsize * sum(upto(part.stop) - upto(part.start) for part in chunks)
