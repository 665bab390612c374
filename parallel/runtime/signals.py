"""Ctrl-C as a flag that all ranks share at the end of a step, not an exception that leaves some of them waiting."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self

GRACE = 1.0
"""Seconds after a signal in which others are taken for the same: a terminal and a launcher may both send it."""


class InterruptFlag:
    """Context manager that notes signals; a second one, later, has its previous effect.

    Parameters
    ----------
    signals : sequence of signal.Signals

    Attributes
    ----------
    number : int
        The first signal that came, or 0.

    Examples
    --------
    >>> with InterruptFlag() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupt.seen  # for engine.step(..., stop=interrupt.seen), whose report tells all ranks
    True
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)):
        self._signals = signals
        self._before: dict[int, Any] = {}
        self.number, self._since = 0, 0.0

    @property
    def seen(self) -> bool:
        """True after the first signal."""
        return self.number > 0

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.seen:
            self.number, self._since = number, now
        elif now - self._since > GRACE:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
