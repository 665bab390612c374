"""Exchange: messages and local work of one round, as streams that progress independently.

A stream is a list of operations that run in order. An operation is a function, or an object with a method `attempt`; it
returns False while it must wait, for a message or for another stream, and is tried again later. An object may have a
method `is_waiting`, which is True while an attempt would return False, and changes nothing. A stream that waits does
not hold up the others, so a rank never withholds a message that a peer needs in order to continue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from collectives.transport.mailbox import NodeMemory


class Stream:
    """Operations that run in order; `position` of them are done."""

    __slots__ = ("calls", "operations", "position")

    def __init__(self) -> None:
        self.operations: list[Any] = []
        self.calls: list[Callable[[], object]] = []
        self.position = 0

    def add(self, operation: Any) -> After:
        """Append an operation and return another one, which waits until the first is done."""
        self.operations.append(operation)
        self.calls.append(getattr(operation, "attempt", operation))
        return After(self, len(self.calls))


class After(NamedTuple):
    """Operation that waits until a stream has done its first `number` operations."""

    stream: Stream
    number: int

    def attempt(self) -> bool:
        return self.stream.position >= self.number

    def is_waiting(self) -> bool:
        return not self.attempt()


class Exchange:
    """One round of streams: `wait` blocks until all are done, `test` runs them as far as possible.

    `uses_network`: some are messages between nodes, by MPI.
    """

    def __init__(self, node: NodeMemory, streams: Sequence[Stream], uses_network: bool = False) -> None:
        self.node, self.uses_network = node, uses_network
        self.streams = self._pending = streams

    @cached_property
    def _independent(self) -> list[Callable[[], object]]:
        """The only operations of all streams, if none waits for another stream; else nothing."""
        for stream in self.streams:
            operation = stream.operations[0]
            if len(stream.calls) > 1 or isinstance(operation, After) or hasattr(operation, "sent"):
                return []  # or an acknowledgement, which waits for the end of the message that it is of
        return [stream.calls[0] for stream in self.streams]

    def prepend(self, stream: Stream) -> None:
        """Add a stream before the others, before the first run."""
        self.streams = self._pending = [stream, *self.streams]

    @property
    def is_waiting(self) -> bool:
        """True if all streams wait for a peer, so that `test` would do nothing; changes nothing itself."""
        for stream in self._pending:
            is_waiting = getattr(stream.operations[stream.position], "is_waiting", None)
            if is_waiting is None or not is_waiting():
                return False
        return True

    def test(self) -> bool:
        """Run all streams as far as possible; True if all are done: the next call starts them anew."""
        moved = True
        while moved:
            moved, waiting = False, []
            for stream in self._pending:
                calls, position = stream.calls, stream.position
                while position < len(calls):
                    if calls[position]() is False:
                        waiting.append(stream)
                        break
                    moved = True
                    stream.position = position = position + 1
            self._pending = waiting
            if not waiting:
                self._pending = self.streams
                for stream in self.streams:
                    stream.position = 0
                return True
        return False

    def wait(self) -> None:
        """Run all streams to the end."""
        spins = self.node.spins
        if self._independent and self._pending is self.streams:  # takes less time, as no position is needed
            waiting = self._independent
            while waiting := [attempt for attempt in waiting if attempt() is False]:
                spins -= 1
                if spins < 0:
                    self.node.yielding(-spins)
        else:
            while not self.test():
                spins -= 1
                if spins < 0:
                    self.node.yielding(-spins)
