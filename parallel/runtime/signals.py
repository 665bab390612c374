"""Signals as a flag, for a stop of all ranks after the same step, instead of an exception on some."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Requests to stop. Launchers pass SIGUSR1 on to all ranks, and batch systems can send it before they kill."""

GRACE = 1.0
"""Seconds in which further signals count as the first one: a terminal and a launcher may both send it."""


class InterruptFlag:
    """Context manager that catches signals, by default SIGINT, SIGTERM, SIGUSR1: `seen` is then True.

    `number` is the first signal's, 0 before. A signal more than `GRACE` seconds after it has its previous effect.
    SIGUSR1, and a SIGTERM after it, never have: a batch system sends them before it ends a job.

    >>> with InterruptFlag() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupt.seen  # for engine.step(..., stop=interrupt.seen): it combines the flags of all ranks
    True
    """

    def __init__(self, numbers: Sequence[int] = NUMBERS) -> None:
        self._numbers, self._before = numbers, dict[int, Any]()
        self.number, self._last, self._since = 0, 0, 0.0

    @property
    def seen(self) -> bool:
        return self.number > 0

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        announced = number == signal.SIGUSR1 or (number == signal.SIGTERM and self._last == signal.SIGUSR1)
        self._last = number
        if not self.seen:
            self.number, self._since = number, now
        elif now - self._since > GRACE and not announced:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)


@contextmanager
def held() -> Iterator[None]:
    """Context of calls in which the MPI waits for all ranks, so that none must leave: Ctrl-C has its effect at the end.

    A second one, more than `GRACE` seconds later, has it at once. A no-op in other threads than the main one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is None:  # the second: a handler in C
        yield
        return
    interrupt = InterruptFlag([signal.SIGINT])
    try:
        with interrupt:
            yield
    finally:
        if interrupt.seen:
            signal.raise_signal(signal.SIGINT)
