"""Profiler of training steps: total seconds by kind of work and, optionally, a list of timed events for a trace."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType
from typing import Any, NamedTuple


class ProfilerEvent(NamedTuple):
    """Timed event, in seconds of `time.perf_counter`. Kinds: "compute", "communication", "flight" (in background)."""

    name: str
    kind: str
    start: float
    end: float
    about: dict[str, Any]


class Profiler:
    """Profiler: total seconds by kind of work in `seconds`. With `trace`, also the single events in `events`.

    Examples
    --------
    >>> recorder = Profiler(trace=True)
    >>> with recorder("communication", "allreduce", bucket=0):
    ...     pass
    >>> recorder.events[0].name, recorder.events[0].about
    ('allreduce', {'bucket': 0})
    """

    def __init__(self, trace: bool = False):
        self.trace = trace
        self.events: list[ProfilerEvent] = []
        self.seconds: Counter[str] = Counter()

    def __call__(self, kind: str, name: str, **about: Any) -> _TimedBlock:
        return _TimedBlock(self, kind, name, about)

    def note(self, kind: str, name: str, start: float, end: float, **about: Any) -> None:
        self.seconds[kind] += end - start  # type: ignore[assignment]
        if self.trace:
            self.events.append(ProfilerEvent(name, kind, start, end, about))


class _TimedBlock:
    __slots__ = ("_about", "_kind", "_name", "_recorder", "_start")

    def __init__(self, recorder: Profiler, kind: str, name: str, about: dict[str, Any]):
        self._recorder, self._kind, self._name, self._about = recorder, kind, name, about

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._recorder.note(self._kind, self._name, self._start, time.perf_counter(), **self._about)
