"""The contract of a wire: bound messages that can be started, waited for, tested and freed, again and again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

pause: Callable[[], object] = getattr(os, "sched_yield", partial(time.sleep, 0))
"""Lets another process run: what everyone does who has asked in vain for a while."""


class Piece(NamedTuple):
    """A run of bytes in memory. A message is a list of pieces, one after another."""

    address: int
    nbytes: int


class Wait(NamedTuple):
    """Two ways to end messages: `wait` returns when they have, `test` says whether they have, and helps them to."""

    wait: Callable[[], object]
    test: Callable[[], bool]


class Wire(Protocol):
    """What a program needs of a transport, for one rank and one stream of messages.

    Messages between two ranks match in the order in which they start. A message is bound once and started any
    number of times; it must have ended before it starts again. The verbs take the messages when the program is
    bound and give back the calls that run every time, so that nothing is looked up on the way.
    """

    def send(self, peer: int, pieces: Sequence[Piece], stays: bool = True) -> Any:
        """A message to `peer` out of the pieces; `stays` says whether they stay as they are until it has left."""
        ...

    def receive(self, peer: int, pieces: Sequence[Piece]) -> Any:
        """A message from `peer` into the pieces."""
        ...

    def starting(self, messages: Sequence[Any]) -> Sequence[Callable[[], object]]:
        """The calls that start all the messages."""
        ...

    def waiting(self, messages: Sequence[Any]) -> Sequence[Wait]:
        """The calls that return when all the messages have ended, each with one that only asks."""
        ...

    def grain(self, peer: int, nbytes: int) -> int | None:
        """In parts of how many bytes a message of so many travels, if the two ranks share memory; 0 for all at once.

        None if they do not. What such parts bring to be combined is combined by `combine`, straight from where it is.
        """
        ...

    def leaves(self, peer: int, nbytes: int, before: int) -> bool:
        """Whether a message has left as soon as it is started, `before` others to the peer ahead of it in its round.

        Its memory may then change at once.
        """
        ...

    def combine(
        self, peer: int, rows: Sequence[tuple[Any, Any]], bind: Callable[[Any, Any, Any], Callable[[], object]]
    ) -> Any:
        """A shared message from `peer` whose end is that it was combined.

        `rows` are pairs of arrays, what the elements are combined with and where the results go, one after another;
        ``bind(incoming, mine, out)`` gives the call that combines a run of them.
        """
        ...

    def swap(self, messages: Sequence[Any]) -> Swapping | None:
        """The messages as one swap of a message for a message, if the wire has a shorter way for that."""
        ...

    def free(self) -> None:
        """Give back whatever the bound messages hold. None of them may be under way."""
        ...


class Swapping(Protocol):
    """A message out and a message in, to be done between arrays that are only known when it is called."""

    def between(self, source: Any, target: Any, sent: Any, received: Any) -> Callable[[Any, Any], None] | None:
        """``swap(sendbuf, recvbuf)`` for arrays like `sent` and `received`, in place of the bound memory; or None."""
        ...

    def halves(self, source: Any, target: Any) -> tuple[Callable[[], object] | None, Wait] | None:
        """What begins the swap of the bound memory and what ends it; or None."""
        ...


class Apart:
    """What wires have in common on which sender and receiver share no memory."""

    def grain(self, peer: int, nbytes: int) -> None:
        """No memory is shared."""

    def leaves(self, peer: int, nbytes: int, before: int) -> bool:
        """Nobody can tell."""
        return False

    def combine(
        self, peer: int, rows: Sequence[tuple[Any, Any]], bind: Callable[[Any, Any, Any], Callable[[], object]]
    ) -> Any:
        """Not here: see `grain`."""
        raise NotImplementedError("nothing is shared on this wire")

    def swap(self, messages: Sequence[Any]) -> None:
        """No shorter way."""
