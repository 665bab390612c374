"""Description of what a program waits for, by the positions in its streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from collectives.engine.assembly import Instruction
from collectives.engine.instructions import CallState, Kind
from collectives.runtime.record.watcher import look
from collectives.runtime.record.writer import record

PHRASES = {
    Kind.RECV: ("a message from", "messages from"),
    Kind.SEND: ("room for a message to", "room for messages to"),
    Kind.WAIT_READ: ("the read of a message by", "reads of messages by"),
    Kind.NET_RECV: ("a message from", "messages from"),
    Kind.NET_SEND: ("the end of a send to", "the ends of sends to"),
}
"""Description of what rows of a kind wait for, by one peer and by several. A NET_WAIT by the kind of its message."""


class AwaitedProgram:
    """Part of a program that waits see: its progress, and what it waits for.

    Attributes
    ----------
    label : collective and algorithm
    broken : a run was aborted, and its messages may still be active
    world_ranks : ranks in MPI.COMM_WORLD of those of the communicator
    begins : rounds of the schedule that are not empty, and the number of the first round of each in `rounds`
    """

    label = "a call"
    world_ranks: Sequence[int] = ()
    broken = False
    begins: tuple[tuple[int, int], ...] = ()
    rows: Any
    instructions: Any
    engine: Any

    @property
    def moves(self) -> int:
        """Number that changes with progress."""
        return int(self.engine.moves)

    def stall(self, idle: float) -> None:
        """Look at the ranks that the program has waited for, `idle` seconds without progress. See `watcher.look`."""
        number, peers = int(self.engine.round), dict[int, tuple[int, int]]()
        for one in self._waiting(number):
            if one.link is not None:
                peers[one.link.rank] = self._world(one.link.rank), int(one.link.link["pid"][0])
            elif one.message is not None:
                peers[one.message.peer] = self._world(one.message.peer), 0
        if (found := record()) is not None:
            first = min((world for world, _ in peers.values()), default=-1)
            found.stall(int(self.engine.number), self._round_of(number), first)
            look(self.label, peers, idle)

    def leave(self) -> None:
        """Mark the run as aborted, also in the record: this rank has left the call before its end."""
        self.broken = True
        self.engine.note_end(CallState.WAS_LEFT)

    def _world(self, rank: int) -> int:
        """Rank in MPI.COMM_WORLD of one in the communicator. Negative if it is in another world, or unknown."""
        return self.world_ranks[rank] if rank < len(self.world_ranks) else -1

    def _round_of(self, number: int) -> int:
        """Round of the schedule, from 1, that a round of the program belongs to. -1 if unknown."""
        reached = [index for index, first in self.begins if first <= number]
        return reached[-1] + 1 if reached else -1

    def describe(self, subject: str) -> str:
        """Sentence on what the program waits for."""
        return f"{self.label}: {subject} {self.waits_for()}"

    def waits_for(self) -> str:
        """Description of the current round, and of what it waits for.

        Another thread may run the program meanwhile: the description may then be out of date, but never fails.
        """
        number = int(self.engine.round)
        awaited = [*self._peers(number), *self._work(number)]
        text = f"for {' and '.join(awaited or ['other ranks'])}"
        reached = self._round_of(number)
        return f"in round {reached} of {self.begins[-1][0] + 1} {text}" if reached > 0 else text

    def _waiting(self, number: int) -> Iterator[Instruction]:
        """Next instruction of each stream of a round."""
        for stream in self.rows.streams[slice(*self.rows.rounds[number : number + 2])]:
            if stream["position"] < stream["stop"]:
                yield self.instructions[stream["position"]]

    def _peers(self, number: int) -> Iterator[str]:
        """Messages that the current rows wait for, with the ranks of peers in the communicator."""
        peers = defaultdict(set)
        for one in self._waiting(number):
            if one.message is not None:
                kind = Kind.NET_RECV if one.message.receives else Kind.NET_SEND
                peers[PHRASES[kind]].add(one.message.peer)
            elif one.kind in PHRASES and one.link is not None:
                peers[PHRASES[one.kind]].add(one.link.rank)
        for (single, several), ranks in peers.items():
            numbers = ", ".join(map(str, sorted(ranks)))
            yield f"{single} rank {numbers}" if len(ranks) == 1 else f"{several} ranks {numbers}"

    def _work(self, number: int) -> Iterator[str]:
        """Descriptions of the functions that the next instructions of a round call."""
        for one in self._waiting(number):
            if one.call is not None:
                awaits = getattr(one.call, "awaits", None)
                yield awaits() if awaits is not None else "local work, or messages of a device"
