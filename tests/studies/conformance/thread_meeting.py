"""Meeting of the threads that are the ranks of a communicator: where they exchange objects, and requests of these."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from mpi4py import MPI

PATIENCE = 300.0
"""Seconds after which a wait counts as a deadlock; a busy machine compiles for long."""


class Meeting:
    """Meeting place of the ranks of one communicator; `all_meetings` are those of the whole run."""

    def __init__(self, size: int, all_meetings: list[Meeting]):
        self.size, self.all_meetings = size, all_meetings
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=PATIENCE)
        self._lock = threading.Condition()
        self._waiting: dict[Any, deque[Message]] = defaultdict(deque)
        self._groups: dict[Any, Meeting] = {}
        self._left: list[dict[int, Any]] = []
        self._started = [0] * size
        all_meetings.append(self)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Values of all ranks."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def leave(self, rank: int, value: Any) -> dict[int, Any]:
        """Leave a value, the rank's next one; returns the values of the ranks that have left theirs, now or later."""
        with self._lock:
            number = self._started[rank]
            self._started[rank] += 1
            if number == len(self._left):
                self._left.append({})
            values = self._left[number]
            values[rank] = value
            if len(values) == self.size:
                self._left[number] = {}  # the requests have it
            self._lock.notify_all()
            return values

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for something that other threads do; BrokenBarrierError if one has failed, or it takes too long."""
        with self._lock:
            self._lock.wait_for(lambda: done() or self._barrier.broken, PATIENCE)
        if not done():
            raise threading.BrokenBarrierError

    def abort(self) -> None:
        """Raise BrokenBarrierError in all waiting threads of the run."""
        for meeting in self.all_meetings:
            meeting._barrier.abort()
            with meeting._lock:
                meeting._lock.notify_all()

    def start(self, key: Any, kind: str, array: np.ndarray) -> Message:
        """Start a send or receive between two ranks; it is done when the other side has been started."""
        message, other = Message(self, array), "receives" if kind == "sends" else "sends"
        with self._lock:
            if not self._waiting[key, other]:
                self._waiting[key, kind].append(message)
                return message
            partner = self._waiting[key, other].popleft()
            sent, received = (message, partner) if kind == "sends" else (partner, message)
            if sent.array.nbytes > received.array.nbytes:
                raise ValueError(f"{key}: expected {received.array.nbytes} bytes, found {sent.array.nbytes}")
            arrived = received.array.reshape(-1).view(np.uint8)
            arrived[: sent.array.nbytes] = sent.array.reshape(-1).view(np.uint8)
            received.nbytes = sent.array.nbytes
            message.done = partner.done = True
            self._lock.notify_all()
        return message

    def expect_alive(self, since: float) -> None:
        """Raise BrokenBarrierError if another thread has failed, or a wait since that time is too long."""
        if self._barrier.broken or time.monotonic() - since > PATIENCE:
            raise threading.BrokenBarrierError

    def group(self, key: Any, size: int) -> Meeting:
        """Meeting of a group of ranks: the same for all that ask with this key."""
        with self._lock:
            if key not in self._groups:
                self._groups[key] = Meeting(size, self.all_meetings)
            return self._groups[key]


class Message:
    """Request of a send or receive; of one that is received, `nbytes` have arrived."""

    def __init__(self, meeting: Meeting, array: np.ndarray):
        self.meeting, self.array, self.done = meeting, array, False
        self.nbytes, self._began = array.nbytes, time.monotonic()

    def Test(self, status: MPI.Status | None = None) -> bool:
        if not (done := self.done):  # read once: the other thread may set it now, and the status is of a done message
            self.meeting.expect_alive(self._began)
        elif status is not None:
            status.Set_elements(MPI.BYTE, self.nbytes)
        return done

    def Wait(self) -> None:
        self.meeting.wait_until(lambda: self.done)


class StartedCall:
    """Request of a collective: `give` returns this rank's value, `take` gets those of all ranks, in their order."""

    def __init__(self, meeting: Meeting, rank: int, give: Callable[[], Any], take: Callable[[list[Any]], None]):
        self._meeting, self._rank, self._give, self._take = meeting, rank, give, take
        self._values: dict[int, Any] | None = None
        self._began = 0.0

    @property
    def active(self) -> bool:
        return self._values is not None

    def Start(self) -> Self:
        self._began = time.monotonic()
        self._values = self._meeting.leave(self._rank, self._give())
        return self

    def Test(self) -> bool:
        if self._values is None:
            return True
        if len(self._values) < self._meeting.size:
            self._meeting.expect_alive(self._began)
            return False
        self._take([value for _, value in sorted(self._values.items())])
        self._values = None
        return True

    Get_status = Test

    def Wait(self, status: Any = None) -> None:
        if (values := self._values) is not None:
            self._meeting.wait_until(lambda: len(values) == self._meeting.size)
        self.Test()

    def Free(self) -> None:
        """No-op: the request has nothing to free."""
