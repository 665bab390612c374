"""Base of the transports that copy device memory: messages to, or from, one peer form a lane.

Lanes advance while a program waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from collectives.transport.wire import Iovec, Wire, pause
from collectives.types import Wait


class MessageLane(Protocol):
    """Messages to, or from, one peer, in the order of their starts."""

    @property
    def is_busy(self) -> bool: ...

    def add(self, message: Any) -> None:
        """Start a message; it is `done` when it has ended."""

    def advance(self) -> None:
        """Begin and end messages as far as possible, in order."""


class MessageParts(NamedTuple):
    """A message: parts that are sent one by one, and the lane that they take."""

    parts: Sequence[Any]
    lane: MessageLane


class DeviceWire(Wire):
    """Transport whose messages are `MessageParts`; `lanes` by kind of messages and peer."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[type, int], Any] = {}

    @property
    def is_busy(self) -> bool:
        """True if messages have started and not ended."""
        return any(lane.is_busy for lane in self.lanes.values())

    def advance(self) -> None:
        """Advance all messages as far as possible."""
        for lane in self.lanes.values():
            lane.advance()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Poll until `done` returns True."""
        turn = 0
        while not done():
            pause(turn := turn + 1)

    def start_calls(self, messages: Sequence[MessageParts]) -> Sequence[Callable[[], object]]:
        return [partial(self._start, messages)] if messages else []

    def _start(self, messages: Sequence[MessageParts]) -> None:
        for parts, lane in messages:
            for part in parts:
                lane.add(part)
        self.advance()

    def wait_calls(self, messages: Sequence[MessageParts]) -> Sequence[Wait]:
        mine = [part for parts, _ in messages for part in parts][::-1]  # the last one mostly ends last

        def test() -> bool:
            self.advance()
            return all(part.done for part in mine)

        return [Wait(partial(self.wait_until, test), test)] if mine else []


class DeviceTransport(DeviceWire):
    """Transport between devices by two others: `near` for `neighbours`, the ranks of the node, `far` for others."""

    in_mailboxes = True

    def __init__(self, near: DeviceWire, far: DeviceWire, neighbours: Collection[int]) -> None:
        super().__init__()
        self._near, self._far, self._neighbours = near, far, neighbours

    def _of(self, peer: int) -> DeviceWire:
        return self._near if peer in self._neighbours else self._far

    def send(self, peer: int, pieces: Sequence[Iovec], stable: bool = True) -> Any:
        return self._of(peer).send(peer, pieces, stable)

    def receive(self, peer: int, pieces: Sequence[Iovec]) -> Any:
        return self._of(peer).receive(peer, pieces)

    def split_size(self, peer: int, nbytes: int) -> int | None:
        return self._of(peer).split_size(peer, nbytes)

    def advance(self) -> None:
        self._near.advance()
        self._far.advance()

    def wait_until(self, done: Callable[[], bool]) -> None:
        self._near.wait_until(done)

    def use_tag(self, tag: int) -> None:
        self._far.use_tag(tag)

    def free(self) -> None:
        self._near.free()
        self._far.free()
