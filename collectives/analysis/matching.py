"""Matching of sends and receives of a schedule, and the order in which its rounds begin and end.

Messages match by MPI's rule, in order per pair of ranks. Sends wait for their receivers, so a schedule without
deadlock in this model has none in any MPI.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from collectives.schedule.steps import Chunks, Copy, Recv, RecvReduce, Reduce, Schedule, Send, Step, numbers, show


class ScheduleError(Exception):
    """Error for a schedule that deadlocks or is wrong. The message names rank, round and step where there are any."""


class ScheduleLocation(NamedTuple):
    """Location of a step: rank, index of the round, index in the round."""

    rank: int
    round: int
    step: int

    def of(self, step: Step) -> str:
        return f"rank {self.rank}, round {self.round}, step {self.step}: {describe(step)}"


Partners: TypeAlias = Mapping[ScheduleLocation, ScheduleLocation]
"""The send of each receive."""


def describe(step: Step) -> str:
    match step:
        case Send(peer, chunks):
            return f"Send of chunks {show(chunks)} to rank {peer}"
        case Recv(peer, chunks):
            return f"Recv of chunks {show(chunks)} from rank {peer}"
        case RecvReduce(peer, chunks, side):
            return f"RecvReduce of chunks {show(chunks)} from rank {peer} on the {side}"
        case Reduce(source, target, side):
            return f"Reduce of chunks {show(source)} into {show(target)} on the {side}"
        case Copy(source, target):
            return f"Copy of chunks {show(source)} to {show(target)}"


def match(schedules: Sequence[Schedule], count: int) -> dict[ScheduleLocation, ScheduleLocation]:
    """Map each receive to its send: the k-th receive from a rank matches the k-th send of that rank to the receiver.

    The data has `count` chunks. Numbers beyond are scratch. ScheduleError if a message has no partner, goes to its own
    rank or to none, or is not as long as its partner.
    """
    sends: dict[tuple[int, int], deque[tuple[ScheduleLocation, Send]]] = defaultdict(deque)
    receives: list[tuple[ScheduleLocation, Recv | RecvReduce]] = []
    for rank, schedule in enumerate(schedules):
        for index, steps in enumerate(schedule):
            for position, step in enumerate(steps):
                if not isinstance(step, (Send, Recv, RecvReduce)):
                    continue
                spot = ScheduleLocation(rank, index, position)
                if step.peer == rank or not 0 <= step.peer < len(schedules):
                    raise ScheduleError(f"{spot.of(step)}: no such peer among {len(schedules)} ranks")
                if isinstance(step, Send):
                    sends[rank, step.peer].append((spot, step))
                else:
                    receives.append((spot, step))
    partners: dict[ScheduleLocation, ScheduleLocation] = {}
    for spot, step in receives:
        queue = sends[step.peer, spot.rank]
        if not queue:
            raise ScheduleError(f"{spot.of(step)}: deadlock, rank {step.peer} never sends this message")
        source, send = queue.popleft()
        # equal chunk lists are the usual case: only others need their lengths compared
        if send.chunks != step.chunks and _length_classes(send.chunks, count) != _length_classes(step.chunks, count):
            raise ScheduleError(f"{spot.of(step)}: does not fit {source.of(send)}")
        partners[spot] = source
    for queue in sends.values():
        for spot, send in queue:
            raise ScheduleError(f"{spot.of(send)}: deadlock, the message is never received")
    return partners


def _length_classes(chunks: Chunks, count: int) -> list[int]:
    """Chunk numbers modulo `count`, the number of chunks. Equal ones have equal lengths, scratch chunks too."""
    return [chunk % count for chunk in numbers(chunks)]


def causal_order(schedules: Sequence[Schedule], partners: Partners) -> Iterator[tuple[str, int, int]]:
    """Yield ("begin" or "end", rank, round) of all rounds in causal order: a round ends after its partners began.

    If ranks wait for one another in a circle, ScheduleError after all rounds that can be reached.
    """
    needs: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for receive, send in partners.items():
        needs[receive.rank, receive.round].append((send.rank, send.round))
        needs[send.rank, send.round].append((receive.rank, receive.round))
    current = [0] * len(schedules)

    def late(rank: int) -> tuple[int, int] | None:
        """First peer that `rank` still waits for, and the round that this peer must reach. None if there is none."""
        return next((need for need in needs[rank, current[rank]] if current[need[0]] < need[1]), None)

    waiting: dict[int, list[int]] = defaultdict(list)
    ready = deque(range(len(schedules)))
    yield from (("begin", rank, 0) for rank, schedule in enumerate(schedules) if schedule)
    while ready:
        rank = ready.popleft()
        while current[rank] < len(schedules[rank]):
            if (need := late(rank)) is not None:
                waiting[need[0]].append(rank)
                break
            yield "end", rank, current[rank]
            current[rank] += 1
            if current[rank] < len(schedules[rank]):
                yield "begin", rank, current[rank]
            # ranks that waited for this one may go on now
            ready.extend(waiting.pop(rank, ()))
    reports = []
    for rank, schedule in enumerate(schedules):
        if current[rank] < len(schedule) and (need := late(rank)) is not None:
            steps = ", ".join(map(describe, schedule[current[rank]]))
            reports.append(
                f"rank {rank}, round {current[rank]} ({steps}) waits for round {need[1]} of rank {need[0]}, "
                f"which is in round {current[need[0]]}"
            )
    if reports:
        raise ScheduleError("deadlock: " + "; ".join(reports))


def causal_levels(schedules: Sequence[Schedule]) -> list[tuple[int, int]]:
    """Return (rank, level) for each round in which a rank waits for a message of a higher level than all before.

    A message sent before its rank has received any has level 1. One sent after messages of level k, level k + 1.
    Messages of one level may all be under way at once, so a rank waits once per level. The schedules are free of
    deadlock.
    """
    levels, found = [0] * len(schedules), list[tuple[int, int]]()
    sent: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # levels of messages from a rank to another

    def play(rank: int) -> Iterator[int]:
        """Run the rounds of a rank. Yield the peer of each message that has not been sent yet."""
        for steps in schedules[rank]:
            latest = 0
            # sends of a round do not depend on its receives, so they leave first
            for step in steps:
                if isinstance(step, Send):
                    sent[rank, step.peer].append(levels[rank] + 1)
            for step in steps:
                if isinstance(step, (Recv, RecvReduce)):
                    arrivals = sent[step.peer, rank]
                    while not arrivals:
                        yield step.peer
                    latest = max(latest, arrivals.popleft())
            if latest > levels[rank]:
                levels[rank] = latest
                found.append((rank, latest))

    plays = [play(rank) for rank in range(len(schedules))]
    ready, waiting = deque(range(len(schedules))), defaultdict[int, list[int]](list)
    while ready:
        rank = ready.popleft()
        peer = next(plays[rank], None)
        if peer is not None:
            waiting[peer].append(rank)
        ready.extend(waiting.pop(rank, ()))
    return found
