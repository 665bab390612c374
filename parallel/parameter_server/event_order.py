"""Order in which a server handles messages: by arrival, or as recorded in an earlier run. No MPI.

Messages that are not allowed yet wait. Every choice becomes an entry of the server's record. In a replay workers read
the same weights, compute the same gradients, and servers apply them in the same order, so the weights are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from parallel.parameter_server.messages import Envelope, MessageKind

ORDERED = frozenset({MessageKind.DRAW, MessageKind.PULL, MessageKind.PUSH, MessageKind.TICK, MessageKind.REST})
"""Kinds whose order influences the result; the others are handled at once."""


class EventEntry(NamedTuple):
    """Recorded event: kind, sender and key of a message; of a DRAW also the assigned part, or -1."""

    kind: int
    source: int
    key: int
    number: int

    def meets(self, envelope: Envelope) -> bool:
        """True if a message matches the entry. Messages of one sender, kind and key arrive in order."""
        message = envelope.message
        return (self.kind, self.source, self.key) == (message.kind, envelope.source, message.key)


class ReplayMismatch(RuntimeError):
    """The messages of a replay differ from the record."""


class EventOrder:
    """Queue of waiting messages.

    Parameters
    ----------
    script : sequence of EventEntry, optional
        Record to replay.

    Attributes
    ----------
    entries : list of EventEntry
        Handled messages.
    """

    def __init__(self, script: Sequence[EventEntry] | None = None):
        self._script, self._waiting = script, list[Envelope]()
        self.entries: list[EventEntry] = []
        self._rests: dict[int, list[bool]] = {}
        self._came: Counter[int] = Counter()
        for entry in script or ():
            self._rests.setdefault(entry.source, []).append(entry.kind == MessageKind.REST)

    def put(self, envelope: Envelope) -> None:
        """Add a message.

        Raises
        ------
        ReplayMismatch
            If the sender has reached the end of the record, or exactly one of message and record is a REST.
        """
        if self._script is not None and envelope.message.kind in ORDERED:
            self._compare(envelope)
        self._waiting.append(envelope)

    def take(self, allowed: Callable[[Envelope], bool]) -> Envelope | None:
        """Next message to handle; None if it has not arrived or is not allowed yet."""
        for at, envelope in enumerate(self._waiting):
            if envelope.message.kind not in ORDERED or (self._next(envelope) and allowed(envelope)):
                return self._waiting.pop(at)
        return None

    def forced(self) -> int | None:
        """Recorded part for the DRAW that was taken; None outside a replay."""
        return None if self._script is None else self._script[len(self.entries)].number

    def note(self, envelope: Envelope, number: int = -1) -> None:
        """Record that a message was handled."""
        self.entries.append(EventEntry(int(envelope.message.kind), envelope.source, envelope.message.key, number))

    def clear(self) -> None:
        """Drop all waiting messages."""
        self._waiting = []

    def _next(self, envelope: Envelope) -> bool:
        if self._script is None:
            return True
        return self._script[len(self.entries)].meets(envelope)

    def _compare(self, envelope: Envelope) -> None:
        """RESTs must lie between the same messages as in the record; otherwise some ranks would wait forever."""
        kind, source = envelope.message.kind, envelope.source
        rests, came = self._rests.get(source, []), self._came[source]
        if came >= len(rests):
            raise ReplayMismatch(f"replay: the record ends before a {kind.name} of rank {source}")
        if rests[came] != (kind is MessageKind.REST):
            raise ReplayMismatch("replay: tests and checkpoints must come after the same steps as in the record")
        self._came[source] += 1
