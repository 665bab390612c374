"""Transport interface: messages are bound once, started and completed any number of times, and finally freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from collectives.engine.assembly import Instruction, Place
from collectives.transport.waits import Pauses


class Iovec(NamedTuple):
    """A contiguous range of bytes in memory, of the host or a device."""

    address: int
    nbytes: int


class Piece(NamedTuple):
    """A contiguous range of bytes in a memory of a program. A message is a sequence of them, concatenated.

    `address` is the range's address in programs that run on the memory they were bound to, such as programs of device
    memory.
    """

    nbytes: int
    place: Place
    address: int = 0

    @property
    def iovec(self) -> Iovec:
        return Iovec(self.address, self.nbytes)


Packing: TypeAlias = Callable[[Sequence[Piece]], list[Place]]


class BoundMessage(NamedTuple):
    """Instructions of a message.

    Attributes
    ----------
    starts : that start the message, or are all of it
    ends : that wait for its end, in a stream of their own. None if the end of `starts` is the end of the message
    key : peer and direction of messages that run in order in one stream. None if they start together with others
    read : waits until the receiver has read a message that was sent by its address
    """

    starts: list[Instruction]
    ends: list[Instruction]
    key: tuple[str, int] | None = None
    read: Instruction | None = None


class Combining(NamedTuple):
    """Reduction of an incoming message with operands of this rank. `reduction` is its number in instructions."""

    reduction: int
    mine_first: bool


class Wire(Protocol):
    """Interface of a transport: binds messages between this rank and its peers.

    Messages between two ranks match in the order in which they start. A message is bound once and started any number
    of times. It must be complete before it starts again. Subclasses whose ranks share no memory inherit the last
    methods but `free`.
    """

    node: Any = None
    """Mailboxes of the ranks of the node. None if there are none."""

    in_mailboxes: bool = False
    """Messages use a channel of the node's mailboxes. One call at a time may run on a channel."""

    lengths_vary: bool = False
    all_short: bool = False
    """Set by `vary`."""

    packing: Packing | None = None

    cell_bytes: int = 0
    part_bytes: int = 0
    streamed: int = 0
    """Bytes of a bounce buffer, of the parts of long messages, and of the longest message that is cut into such."""

    def vary(self, all_short: bool, packing: Packing) -> None:
        """Bind messages for a program for any length, in chunks. `all_short`: those in mailboxes fit a bounce buffer.

        `packing` gives the pieces of a message between nodes places one after the other.
        """
        self.lengths_vary, self.all_short, self.packing = True, all_short, packing

    def send(self, peer: int, pieces: Sequence[Piece], stable: bool = True) -> BoundMessage:
        """Bind a send to `peer`. `stable`: the pieces do not change before the message is complete."""

    def receive(self, peer: int, pieces: Sequence[Piece]) -> BoundMessage:
        """Bind a receive from `peer` into the pieces."""

    def split_size(self, peer: int, nbytes: int) -> int | None:
        """Bytes per part of a message of `nbytes` to or from `peer`. 0 for a single part, None without shared memory.

        Incoming parts are reduced by `combine`, directly from the sender's memory.
        """
        return None

    def segment_size(self, nbytes: int, usual: int) -> int:
        """Bytes per part of a message of `nbytes` without shared memory, equal at both ends. 0 for a single part.

        `usual`: the bytes per part of transports that do not decide by themselves.
        """
        return usual

    def completes_locally(self, peer: int, nbytes: int, before: int) -> bool:
        """True if a send that is not `stable` is copied once a slot is free, so that its buffer is then reusable.

        `before` is the number of messages to the same peer that start earlier in the round.
        """
        return False

    def combine(self, peer: int, pairs: Sequence[tuple[Piece, Piece]], how: Combining) -> BoundMessage:
        """Bind a shared-memory message from `peer` that is reduced on arrival: pairs (local operand, result)."""
        raise TypeError("this transport has no shared memory")

    def yielding(self, pauses: Pauses) -> None:
        """Pause after an unsuccessful poll of a wait for messages."""
        pauses.pause()

    def use_tag(self, tag: int) -> None:
        """Set the tag of messages of a device over MPI that start from now on."""
        return

    def free(self) -> None:
        """Free the resources of all bound messages, none of which may be in progress."""


class NoMessages(Wire):
    """Transport of a program without messages."""

    def send(self, peer: int, pieces: Sequence[Piece], stable: bool = True) -> BoundMessage:
        raise TypeError("this program has no messages")

    def receive(self, peer: int, pieces: Sequence[Piece]) -> BoundMessage:
        raise TypeError("this program has no messages")

    def free(self) -> None:
        """No resources to free."""
