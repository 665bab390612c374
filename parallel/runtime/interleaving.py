"""Two computations of a rank in turns: while messages of one travel, the other computes.

Each has a thread, and only one of them runs at a time: until it calls `give_way`, between start and end of an
exchange, or returns. So the order of all calls follows from the program alone. It is equal on all ranks that make the
same calls and give way equally often: collectives need no further care, and operators need not know of each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import TypeVar

First = TypeVar("First")
Second = TypeVar("Second")


class Abandoned(BaseException):
    """Raised by `give_way` if the other computation has raised an exception."""


class _Computation:
    """One of two computations. Invariant: while both exist, all threads but one wait for their `turn`."""

    other: _Computation

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.ended = False
        self.error: BaseException | None = None
        self.away = 0.0

    def give_way(self) -> None:
        if not self.other.ended:
            began = time.perf_counter()
            self.other.turn.release()
            self.turn.acquire()
            self.away += time.perf_counter() - began
        if self.other.error is not None:
            raise Abandoned

    def end(self) -> None:
        self.ended = True
        self.other.turn.release()


_current: ContextVar[_Computation | None] = ContextVar("interleaved computation", default=None)


def give_way() -> None:
    """Let the other computation of `interleave` run until it gives way too, or returns. Elsewhere a no-op."""
    if (computation := _current.get()) is not None:
        computation.give_way()


def own_time() -> float:
    """Seconds of `time.perf_counter`, without the time in which this computation has given way."""
    computation = _current.get()
    return time.perf_counter() - (0.0 if computation is None else computation.away)


def interleave(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """Call two functions in turns, beginning with the first. Return both results.

    The second is called in another thread, with a copy of the context variables. If one raises an exception, the other
    ends where it gives way. `interleave` raises the exception when both have ended.

    >>> def count(name):
    ...     for number in range(2):
    ...         print(name, number)
    ...         give_way()
    >>> interleave(lambda: count("a"), lambda: count("b"))
    a 0
    b 0
    a 1
    b 1
    (None, None)
    """
    one, two = _Computation(), _Computation()
    one.other, two.other = two, one
    results: list[Second] = []

    def run() -> None:
        _current.set(two)
        two.turn.acquire()
        try:
            if one.error is None:
                results.append(second())
        except BaseException as error:
            two.error = error
        finally:
            two.end()

    thread = threading.Thread(target=copy_context().run, args=(run,), name="chorus-interleaved", daemon=True)
    thread.start()
    token = _current.set(one)
    try:
        result = first()
    except BaseException as error:
        one.error = error
        if not isinstance(error, Abandoned):
            raise
    finally:
        _current.reset(token)
        one.end()
        thread.join()
    if two.error is not None:
        raise two.error
    return result, results[0]
