"""Base of the transports that copy device memory: messages to, or from, one peer form a lane.

Lanes advance while a program waits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from collectives.engine.assembly import calling
from collectives.transport.waits import Pauses
from collectives.transport.wire import BoundMessage, Iovec, Piece, Wire


class MessageLane(Protocol):
    """Messages to, or from, one peer, in the order of their starts."""

    @property
    def is_busy(self) -> bool: ...

    def add(self, message: Any) -> None:
        """Start a message. It is `done` when it has ended."""

    def advance(self) -> None:
        """Begin and end messages as far as possible, in order."""


class MessageParts(NamedTuple):
    """A message: parts that are sent one by one, and the lane that they take."""

    parts: Sequence[Any]
    lane: MessageLane


class DeviceWire(Wire):
    """Transport whose messages are `MessageParts`. `lanes` by kind of messages and peer."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[type, int], Any] = {}
        self.whole: DeviceWire = self
        """Transport that this one is a part of: all of its messages advance together."""

    @property
    def is_busy(self) -> bool:
        """True if messages have started and not ended."""
        return any(lane.is_busy for lane in self.lanes.values())

    def advance(self) -> None:
        """Advance all messages as far as possible."""
        for lane in self.lanes.values():
            lane.advance()

    def outgoing(self, peer: int, pieces: Sequence[Iovec]) -> MessageParts:
        """Bind a send to a peer."""
        raise NotImplementedError

    def incoming(self, peer: int, pieces: Sequence[Iovec]) -> MessageParts:
        """Bind a receive from a peer."""
        raise NotImplementedError

    def send(self, peer: int, pieces: Sequence[Piece], stable: bool = True) -> BoundMessage:
        return self._message(self.outgoing(peer, [piece.iovec for piece in pieces]))

    def receive(self, peer: int, pieces: Sequence[Piece]) -> BoundMessage:
        return self._message(self.incoming(peer, [piece.iovec for piece in pieces]))

    def _message(self, message: MessageParts) -> BoundMessage:
        def start() -> None:
            for part in message.parts:  # the first test begins the messages, together with others of the same round
                message.lane.add(part)

        last_first = message.parts[::-1]  # the last one mostly ends last

        def test() -> bool:
            self.whole.advance()
            return all(part.done for part in last_first)

        return BoundMessage([calling(start)], [calling(test)])


class DeviceTransport(DeviceWire):
    """Transport between devices by two others: `near` for `neighbours`, the ranks of the node, `far` for others."""

    in_mailboxes = True

    def __init__(self, near: DeviceWire, far: DeviceWire, neighbours: Collection[int]) -> None:
        super().__init__()
        self._near, self._far, self._neighbours = near, far, neighbours
        near.whole = far.whole = self

    def _of(self, peer: int) -> DeviceWire:
        return self._near if peer in self._neighbours else self._far

    def outgoing(self, peer: int, pieces: Sequence[Iovec]) -> MessageParts:
        return self._of(peer).outgoing(peer, pieces)

    def incoming(self, peer: int, pieces: Sequence[Iovec]) -> MessageParts:
        return self._of(peer).incoming(peer, pieces)

    def split_size(self, peer: int, nbytes: int) -> int | None:
        return self._of(peer).split_size(peer, nbytes)

    def advance(self) -> None:
        self._near.advance()
        self._far.advance()

    def yielding(self, pauses: Pauses) -> None:
        self._near.yielding(pauses)

    def use_tag(self, tag: int) -> None:
        self._far.use_tag(tag)

    def free(self) -> None:
        self._near.free()
        self._far.free()
