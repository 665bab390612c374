"""Transport interface: messages are bound once, started and completed any number of times, and finally freed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from collectives.types import Wait

YIELDS = 100
"""Yields of the core in one wait before it sleeps between polls, if ranks share cores."""

NAP = 2e-5
"""Seconds of such a sleep; the kernel's timer adds about 50 us."""

_yield_core: Callable[[], object] = getattr(os, "sched_yield", partial(time.sleep, 0))
_cores_are_shared = False


def share_cores() -> None:
    """Let long waits of this process sleep from now on, since its node has more ranks than cores."""
    global _cores_are_shared
    _cores_are_shared = True


def cores_are_shared() -> bool:
    """True after `share_cores`."""
    return _cores_are_shared


WATCHED_PAUSES = 200
"""Pauses from one call of the `watchers` to the next."""

watchers: list[Callable[[], object]] = []
"""Functions that waits for other ranks call now and then; one that raises an error ends the wait."""

_pauses = 0


def call_watchers() -> None:
    """Call the `watchers`: in waits that sleep for long between polls in place of `pause`."""
    for watch in tuple(watchers):
        watch()


def pause(turn: int = 0) -> None:
    """Yield the core after unsuccessful polls; `turn` is the number of pauses of this wait so far.

    A rank that waits long sleeps if ranks share cores: the scheduler gives a process that only yields as much of the
    core as one that works.
    """
    global _pauses
    _pauses += 1
    if not _pauses % WATCHED_PAUSES:
        call_watchers()
    if turn > YIELDS and _cores_are_shared:
        time.sleep(NAP)
    else:
        _yield_core()


_failed_tests = 0


def pause_after_test(complete: bool) -> None:
    """Sleep after each of many tests of requests in succession that have failed, if ranks share cores.

    A program that only tests would keep the cores, and the lock of the MPI, from those it waits for.
    """
    global _failed_tests
    _failed_tests = 0 if complete else _failed_tests + 1
    if _failed_tests > YIELDS and _cores_are_shared:
        time.sleep(NAP)


class Iovec(NamedTuple):
    """A contiguous range of bytes. A message is a sequence of them, concatenated."""

    address: int
    nbytes: int


class Reduction(Protocol):
    """Function that binds the reduction of incoming data with an own operand: ``bind(incoming, mine, out)``.

    `ufunc` is NumPy's function, if there is one; `mine_first`: the own operand is the left one.
    """

    @property
    def ufunc(self) -> Callable[..., Any] | None: ...

    @property
    def mine_first(self) -> bool: ...

    def __call__(self, incoming: Any, mine: Any, out: Any) -> Callable[[], object]: ...


class Wire(Protocol):
    """Interface of a transport: bind messages between this rank and its peers, and make calls that run them.

    Messages between two ranks match in the order in which they start. A message is bound once and started any number of
    times; it must be complete before it starts again. `start_calls` and `wait_calls` run when a program is bound and
    return the functions that every execution calls, so that nothing is looked up at run time. Subclasses whose ranks
    share no memory inherit the last methods but `free`.
    """

    node: Any = None
    """Memory that ranks of the node share, for programs of exchanges; None if messages are started and waited for."""

    in_mailboxes: bool = False
    """Messages use a channel of the node's mailboxes, on which one call at a time may run."""

    def send(self, peer: int, pieces: Sequence[Iovec], stable: bool = True) -> Any:
        """Bind a send to `peer` and return it. `stable`: the pieces do not change before the message is complete."""

    def receive(self, peer: int, pieces: Sequence[Iovec]) -> Any:
        """Bind a receive from `peer` into the pieces and return it."""

    def start_calls(self, messages: Sequence[Any]) -> Sequence[Callable[[], object]]:
        """Functions that start all the messages."""

    def wait_calls(self, messages: Sequence[Any]) -> Sequence[Wait]:
        """Pairs of functions (wait, test) that together complete all the messages."""

    def split_size(self, peer: int, nbytes: int) -> int | None:
        """Bytes per part of a message of `nbytes` to or from `peer`; 0 for a single part, None without shared memory.

        Incoming parts are reduced by `combine`, directly from the sender's memory.
        """
        return None

    def segment_size(self, nbytes: int, usual: int) -> int:
        """Bytes per part of a message of `nbytes` without shared memory, equal at both ends; 0 for a single part.

        `usual`: the bytes per part of transports that do not decide by themselves.
        """
        return usual

    def completes_locally(self, peer: int, nbytes: int, before: int) -> bool:
        """True if a send that is not `stable` is copied once a slot is free, so that its buffer is then reusable.

        `before` is the number of messages to the same peer that start earlier in the round.
        """
        return False

    def stream_key(self, message: Any) -> tuple[str, int] | None:
        """Key of messages that run in order as operations of an `Exchange`; None for those with starts and waits."""
        return None

    def combine(self, peer: int, rows: Sequence[tuple[Any, Any]], bind: Reduction) -> Any:
        """Bind a shared-memory message from `peer` that is reduced on arrival.

        `rows` are pairs of arrays (local operand, result), concatenated; ``bind(incoming, mine, out)`` returns the
        function that reduces a contiguous range of them.
        """
        raise TypeError("this transport has no shared memory")

    def describe(self, message: Any) -> Any:
        """Description of a persistent message over MPI, from which compiled code sends it; None for all others."""
        return None

    def use_tag(self, tag: int) -> None:
        """Set the tag of messages over MPI that start from now on, if they are sent anew at every start."""
        return

    def free(self) -> None:
        """Free the resources of all bound messages, none of which may be in progress."""
