"""Ctrl-C as a wish that all ranks hear at the end of a step, not an exception that leaves some of them waiting."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self


class Interrupt:
    """While it is open, these signals are only noted; the second one of a kind does what it did before.

    Parameters
    ----------
    signals : sequence of signal.Signals

    Attributes
    ----------
    seen : bool

    Examples
    --------
    >>> with Interrupt() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupt.seen  # for engine.step(..., stop=interrupt.seen), whose report tells all ranks
    True
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)):
        self._signals = signals
        self._before: dict[int, Any] = {}
        self.seen = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.signal(number, self._before[number])
