"""Waits for other ranks: pauses between polls, time limits, and functions that are called meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from typing import Any, Protocol, Self

from mpi4py import MPI

from collectives.errors import InvalidArgument, InvalidType, Timeout

YIELDS, FEW_YIELDS = 100, 10
"""Yields of the core in one wait before it checks the clock, and sleeps between polls if ranks share cores.

The second number holds if they do not: then polls between two yields take longer.
"""

NAP = 2e-5
"""Seconds of such a sleep. The kernel's timer adds about 50 us."""

LONG = 0.5
"""Seconds without progress after which a wait leaves the core to others, by naps between its polls."""

LOOKS = 10
"""Looks for progress in this time."""

STALL = 0.25
"""Seconds from one call of `Awaited.stall` to the next."""

LONGEST_NAP = 16e-3
"""Seconds of such a nap. The first one is short, each other one twice as long as the one before."""

NAPS = 128
"""Least naps in a time as long as the wait has lasted: its end is noticed at most so much later."""

_yield_core: Callable[[], object] = getattr(os, "sched_yield", partial(time.sleep, 0))
_cores_are_shared = False


def share_cores() -> None:
    """Let waits of this process sleep from now on, since its node has more ranks than cores."""
    global _cores_are_shared
    _cores_are_shared = True


def cores_are_shared() -> bool:
    """True after `share_cores`."""
    return _cores_are_shared


WATCHED_PAUSES = 200
"""Pauses from one call of the `watchers` to the next."""

watchers: list[Callable[[], object]] = []
"""Functions that waits for other ranks call now and then. One that raises an error ends the wait."""

explainers: list[Callable[[], Sequence[str]]] = []
"""Functions that return sentences on why ranks wait."""

_pauses = 0


def call_watchers() -> None:
    """Call the `watchers`: in waits that sleep for long between polls in place of `pause`."""
    for watch in tuple(watchers):
        watch()


def pause() -> None:
    """Yield the core after an unsuccessful poll. `watchers` are called now and then."""
    global _pauses
    _pauses += 1
    if not _pauses % WATCHED_PAUSES:
        call_watchers()
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


# ------------------------------------------------------------------------------------------ time limits


class Awaited(Protocol):
    """Interface of what a wait waits for."""

    @property
    def moves(self) -> int:
        """Number that changes with its progress."""

    def stall(self, idle: float) -> None:
        """Look at the other ranks after `idle` seconds without progress. An error that it raises ends the wait."""

    def describe(self, subject: str) -> str:
        """Sentence that describes the wait, with a subject and verb such as "rank 0 waited 5 s"."""


class Others:
    """Other ranks, of whose progress nothing is known: `purpose` follows the verb, as "for other ranks"."""

    moves = 0

    def __init__(self, name: str, purpose: str = "for other ranks") -> None:
        self._name, self._purpose = name, purpose

    def stall(self, idle: float) -> None:
        """Do nothing: it is not known who is waited for."""

    def describe(self, subject: str) -> str:
        return f"{self._name}: {subject} {self._purpose}"


def seconds_of(timeout: Any, name: str = "timeout") -> float:
    """Seconds of a time limit that a user has given. Raises InvalidType or InvalidArgument."""
    if type(timeout) is float and timeout > 0:  # most are, and calls are short
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise InvalidType(MPI.ERR_ARG, f"{name}: expected seconds, or None for no limit, found {timeout!r}")
    seconds = float(timeout)
    if not seconds > 0:
        raise InvalidArgument(MPI.ERR_ARG, f"{name}: expected more than 0 seconds, found {timeout!r}")
    return seconds


class _Limits(threading.local):
    """Time limits of each thread."""

    current: Deadline | None = None


_limits = _Limits()


def has_deadline() -> bool:
    """True if waits of this thread have a time limit."""
    return _limits.current is not None


class Deadline:
    """Time limit of all waits in its ``with`` block, in this thread: `timeout` seconds from its creation.

    `rank` is for the error: this one's, in the communicator of the call.
    """

    def __init__(self, timeout: Any, rank: int) -> None:
        self._seconds, self._rank = seconds_of(timeout), rank
        self.end = time.monotonic() + self._seconds

    def __enter__(self) -> Self:
        self._outer, _limits.current = _limits.current, self
        return self

    def __exit__(self, *_: object) -> None:
        _limits.current = self._outer

    def error(self, awaited: Awaited) -> Timeout:
        """Error of a wait at the end of the time; of a long one, it has the causes."""
        text = awaited.describe(f"rank {self._rank} waited {self._seconds:.6g} s")
        causes = [cause for explain in explainers for cause in explain()] if self._seconds >= LONG else []
        return Timeout(MPI.ERR_PENDING, "\ncause: ".join([text, *causes]))


def limited(timeout: float | None, rank: int) -> AbstractContextManager[object]:
    """`Deadline`, or a context without effect if there is no `timeout`."""
    return nullcontext() if timeout is None else Deadline(timeout, rank)


class Pauses:
    """Pauses of one wait for other ranks, made after its first unsuccessful poll.

    They yield the core. A rank that waits long sleeps if ranks share cores: the scheduler gives a process that only
    yields as much of the core as one that works. After `LONG` seconds without progress any rank naps.

    Attributes
    ----------
    is_long : the wait naps, so that further polls between two pauses are of no use
    """

    __slots__ = (
        "_awaited",
        "_deadline",
        "_moved",
        "_moves",
        "_nap",
        "_next_look",
        "_next_stall",
        "_yields",
        "is_long",
    )

    def __init__(self, awaited: Awaited) -> None:
        self._awaited, self._moves = awaited, awaited.moves
        self._deadline, self._next_look = _limits.current, time.monotonic() + LONG / LOOKS
        self._yields = YIELDS if _cores_are_shared else FEW_YIELDS
        self._nap, self.is_long = NAP, False
        self._moved, self._next_stall = time.monotonic(), 0.0

    def pause(self, count: int = 1) -> None:
        """Pause after an unsuccessful poll that has taken as long as `count` yields. Raise Timeout if time is up."""
        global _pauses
        _pauses += 1
        if not _pauses % WATCHED_PAUSES:
            call_watchers()
        self._yields -= count
        now = time.monotonic()
        if self._yields >= 0 and now < self._next_look:  # a yield may take long beside other programs
            _yield_core()
            return
        if self._deadline is not None and now >= self._deadline.end:
            raise self._deadline.error(self._awaited)
        if now >= self._next_look:
            self._nap_or_go_on(now)
        elif _cores_are_shared:
            time.sleep(NAP)
        else:
            _yield_core()

    def _nap_or_go_on(self, now: float) -> None:
        """Look for progress, and nap if there was none for long."""
        moves = self._awaited.moves
        if moves != self._moves:
            self._moves, self._moved = moves, now
        self.is_long = now - self._moved >= LONG
        if self.is_long and now >= self._next_stall:
            self._next_stall = now + STALL
            self._awaited.stall(now - self._moved)
        if not self.is_long:
            self._next_look, self._nap = now + LONG / LOOKS, NAP
            return
        self._nap = min(2 * self._nap, (now - self._moved) / NAPS, LONGEST_NAP)
        left = self._nap if self._deadline is None else self._deadline.end - now
        time.sleep(min(self._nap, left))
