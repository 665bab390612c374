"""In which order a server acts on what has arrived: as it comes, or as it came another time. Knows no MPI.

What is not allowed yet waits. Every choice is an entry of the server's record, so that the same training can be played
again: workers that read the same weights compute the same gradients, and servers that act on them in the same order
come to the same weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from parallel.parameter_server.messages import Kind, Letter

ORDERED = frozenset({Kind.DRAW, Kind.PULL, Kind.PUSH, Kind.TICK, Kind.REST})
"""Kinds whose order decides what is computed; the others are acted on at once."""


class Entry(NamedTuple):
    """What a server acted on: the kind, who sent it, which key; of a DRAW also the part that it handed out, or -1."""

    kind: int
    source: int
    key: int
    number: int

    def meets(self, letter: Letter) -> bool:
        """Whether a letter is this one. A sender's letters of a kind and key come in their order."""
        message = letter.message
        return (self.kind, self.source, self.key) == (message.kind, letter.source, message.key)


class Played(RuntimeError):
    """What happens is not what was recorded."""


class Order:
    """The choice among letters that wait.

    Parameters
    ----------
    script : sequence of Entry, optional
        What was recorded another time, to be played again.

    Attributes
    ----------
    entries : list of Entry
        What was acted on, for a record.
    """

    def __init__(self, script: Sequence[Entry] | None = None):
        self._script, self._waiting = script, list[Letter]()
        self.entries: list[Entry] = []
        self._rests: dict[int, list[bool]] = {}
        self._came: Counter[int] = Counter()
        for entry in script or ():
            self._rests.setdefault(entry.source, []).append(entry.kind == Kind.REST)

    def put(self, letter: Letter) -> None:
        """Something has arrived.

        Raises
        ------
        Played
            If its sender has come to the end of the record, or rests where it did not, or the other way round.
        """
        if self._script is not None and letter.message.kind in ORDERED:
            self._compare(letter)
        self._waiting.append(letter)

    def take(self, allowed: Callable[[Letter], bool]) -> Letter | None:
        """The letter to act on next; None if that has not come, or is not allowed yet."""
        for at, letter in enumerate(self._waiting):
            if letter.message.kind not in ORDERED or (self._next(letter) and allowed(letter)):
                return self._waiting.pop(at)
        return None

    def forced(self) -> int | None:
        """Which part a DRAW that was taken must be given; None if that is free."""
        return None if self._script is None else self._script[len(self.entries)].number

    def note(self, letter: Letter, number: int = -1) -> None:
        """It was acted on."""
        self.entries.append(Entry(int(letter.message.kind), letter.source, letter.message.key, number))

    def clear(self) -> None:
        """Nothing waits any more."""
        self._waiting = []

    def _next(self, letter: Letter) -> bool:
        if self._script is None:
            return True
        return self._script[len(self.entries)].meets(letter)

    def _compare(self, letter: Letter) -> None:
        """Rests are where all waited for all: between the same letters, or some would wait for ever."""
        kind, source = letter.message.kind, letter.source
        rests, came = self._rests.get(source, []), self._came[source]
        if came >= len(rests):
            raise Played(f"replay: the record ends before a {kind.name} of rank {source}")
        if rests[came] != (kind is Kind.REST):
            raise Played("replay: tests and checkpoints must come after the same steps as in the record")
        self._came[source] += 1
