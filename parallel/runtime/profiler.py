"""What happens when in a training step: seconds by kind, and, on request, every event for a trace."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType
from typing import Any, NamedTuple


class Event(NamedTuple):
    """Something that took time, by `time.perf_counter`.

    Attributes
    ----------
    kind : str
        ``"compute"`` or ``"communication"``; ``"flight"`` for what was under way beside these.
    """

    name: str
    kind: str
    start: float
    end: float
    about: dict[str, Any]


class Recorder:
    """Adds up seconds by kind.

    Parameters
    ----------
    trace : bool
        Whether to keep events, too.

    Examples
    --------
    >>> recorder = Recorder(trace=True)
    >>> with recorder("communication", "allreduce", bucket=0):
    ...     pass
    >>> recorder.events[0].name, recorder.events[0].about
    ('allreduce', {'bucket': 0})
    """

    def __init__(self, trace: bool = False):
        self.trace = trace
        self.events: list[Event] = []
        self.seconds: Counter[str] = Counter()

    def __call__(self, kind: str, name: str, **about: Any) -> _Timed:
        return _Timed(self, kind, name, about)

    def note(self, kind: str, name: str, start: float, end: float, **about: Any) -> None:
        """Record something whose times are known."""
        self.seconds[kind] += end - start  # type: ignore[assignment]
        if self.trace:
            self.events.append(Event(name, kind, start, end, about))


class _Timed:
    __slots__ = ("_about", "_kind", "_name", "_recorder", "_start")

    def __init__(self, recorder: Recorder, kind: str, name: str, about: dict[str, Any]):
        self._recorder, self._kind, self._name, self._about = recorder, kind, name, about

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._recorder.note(self._kind, self._name, self._start, time.perf_counter(), **self._about)
