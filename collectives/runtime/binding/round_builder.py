"""Streams of one round of a program, and the points at which they wait for each other."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from collectives.engine.assembly import Instruction, Point, waiting
from collectives.runtime.binding.chunk_locations import overlap
from collectives.schedule.chunks import MemorySpan
from collectives.transport.wire import BoundMessage


class RoundAction(NamedTuple):
    """Local work of a step, run once `message` is complete (None: all of the round). Then `following` is started."""

    step: int
    message: BoundMessage | None
    work: list[Instruction]
    onto: list[MemorySpan]
    following: BoundMessage | None = None


class RoundBuilder:
    """Streams of one round, in the order of their first instructions.

    There is one for each peer and direction, one for local work, and one for each network message.
    """

    def __init__(self, later: set[int]) -> None:
        self._later = later
        self.streams: defaultdict[Any, list[Instruction]] = defaultdict(list)
        self._ends: dict[int, Point] = {}  # by the id of a message: the point at which it has ended
        self._sent: list[tuple[BoundMessage, list[MemorySpan]]] = []
        self._reduced: list[tuple[BoundMessage, list[MemorySpan]]] = []

    @property
    def local(self) -> list[Instruction]:
        return self.streams["local"]

    def _add(self, message: BoundMessage, stream: list[Instruction] | None = None) -> None:
        """Append a message to its stream. A network message gets one of its own, after its start in `stream`."""
        if message.key is None and id(message) in self._later and stream is None:  # `act` adds it
            return
        if message.key is not None:
            stream = self.streams[message.key]
        elif stream is None:
            stream = self.streams["network"]
        stream += message.starts
        begun = ended = Point(stream, len(stream))
        if message.ends or message.read is not None:
            own = self.streams[("read", *message.key) if message.key else id(message)]
            own += [waiting(begun), *message.ends, *([] if message.read is None else [message.read])]
            ended = Point(own, len(own))
        self._ends[id(message)] = ended

    def send(self, message: BoundMessage, places: list[MemorySpan]) -> None:
        self._add(message)
        self._sent.append((message, places))

    def receive(self, message: BoundMessage, onto: list[MemorySpan]) -> None:
        """Append a receive. If it reduces `onto` memory directly, it waits for what must read or write that before."""
        for other, places in (*self._sent, *self._reduced) if onto else ():
            if overlap(places, onto) and other.key != message.key:
                self.streams[message.key].append(waiting(self._ends[id(other)]))
        self._add(message)
        if onto:
            self._reduced.append((message, onto))

    def act(self, action: RoundAction) -> None:
        """Append local work, after its message and the sends of what it overwrites, or after all messages."""
        waits = [id(action.message), *(id(send) for send, places in self._sent if overlap(places, action.onto))]
        awaited = list(self._ends) if action.message is None else waits
        self.local.extend(waiting(self._ends[message]) for message in awaited)
        self.local.extend(action.work)
        if action.following is not None:
            self._add(action.following, self.local)
