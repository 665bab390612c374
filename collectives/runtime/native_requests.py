"""Non-blocking collectives as MPI requests, so that mpi4py's functions on lists of requests accept them.

`MPI.Request.Waitall` and similar functions are C: they pass the handles of a list to the MPI. A `NativeRequest` has the
handle of a generalized request, which is completed at the end of the collective. While a thread waits inside the MPI,
it calls nothing of this package, so a helper thread progresses active requests. It does nothing while the program makes
progress itself, and ends when no request is active.
"""

# mypy: disable-error-code="misc"
# Methods of the two base classes differ in the return types of mpi4py's lower-case names.

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI

from collectives.runtime.call import Call
from collectives.runtime.program import Program
from collectives.runtime.progress import active_requests, progress_count, progress_lock
from collectives.runtime.requests import Request

LONGEST_SLEEP = 1e-3
"""Seconds between two checks of the helper thread while the program makes progress itself, or nothing progresses."""

SHORTEST_SLEEP = 2e-5
"""Seconds to the next check after progress."""

IDLE_CHECKS = 500
"""Consecutive checks without active requests, after which the helper thread ends."""


@cache
def available() -> bool:
    """True if the MPI allows calls from several threads at once, which the helper thread requires."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def new_request(name: str, program: Program, release: Callable[[Request, Program], None], call: Call) -> Request:
    """Create the request of a non-blocking collective: a `NativeRequest` if MPI is thread-safe, else a `Request`."""
    return (NativeRequest if available() else Request)(name, program, release, call)


class GeneralizedHandle:
    """MPI generalized request, which this process completes at the end of a collective."""

    def __init__(self) -> None:
        self._failures: list[bool] = []
        self.request: MPI.Request = MPI.Grequest.Start(_query, None, None, (self._failures,))

    def complete(self, failed: bool) -> None:
        """Complete the MPI request; if `failed`, all waits for it raise an error."""
        if failed:
            self._failures.append(True)
        self.request.Complete()  # type: ignore[attr-defined]


def _query(status: MPI.Status, failures: list[bool]) -> None:
    """Query callback of the generalized request: raises if a failure was recorded, and leaves the status as it is."""
    if failures:
        raise MPI.Exception(MPI.ERR_OTHER)


class SelfMessageHandle:
    """Receive that this process completes by a message to itself; replaces the generalized request on Intel MPI.

    Intel MPI holds a lock while it calls `_query`, which waits for the interpreter's lock. A thread that has this one
    and waits for the first, as in `MPI.Datatype.Free`, would wait for ever. Open MPI, on the other hand, reports no
    error for a message longer than the receive if the receive was waited for before.
    """

    _comm: MPI.Intracomm | None = None
    _tags = count()
    _free_tags: ClassVar[list[int]] = []
    _sent, _received = np.zeros(64, np.uint8), np.zeros(1, np.uint8)

    def __init__(self) -> None:
        if SelfMessageHandle._comm is None:
            SelfMessageHandle._comm = MPI.COMM_SELF.Dup()
        try:
            self._tag = self._free_tags.pop()  # of no pending receive
        except IndexError:
            self._tag = next(self._tags)
        self.request = SelfMessageHandle._comm.Irecv([self._received, 1, MPI.BYTE], 0, self._tag)

    def complete(self, failed: bool) -> None:
        """Complete the request by a message; if `failed`, one longer than the receive, so that waits raise an error."""
        assert self._comm is not None, "made with the receive"
        self._comm.Send([self._sent, len(self._sent) if failed else 0, MPI.BYTE], 0, self._tag)
        self._free_tags.append(self._tag)  # the receive was posted before, and has matched


HANDLE = SelfMessageHandle if MPI.Get_library_version().startswith("Intel") else GeneralizedHandle


class NativeRequest(Request, MPI.Request):
    """Non-blocking collective that is also an `MPI.Request`: mpi4py's ``Waitall``, ``Waitany`` and so on accept it.

    Its own `Wait` and `Test` progress it in this thread, which is faster.
    """

    def __new__(cls, *_: Any) -> NativeRequest:
        handle = HANDLE()
        self = MPI.Request.__new__(cls, handle.request)
        self._handle = handle
        return self

    _handle: GeneralizedHandle | SelfMessageHandle

    def __bool__(self) -> bool:
        return MPI.Request.__bool__(self)

    def begin(self, gate: Callable[[], bool] | None) -> None:
        super().begin(gate)
        if self.active:
            _start_helper()

    def _ended(self) -> None:
        super()._ended()
        self._handle.complete(self._broken)

    def _report(self, status: MPI.Status | None) -> None:
        """Wait for the completed MPI request, which frees its handle, and fill the status."""
        MPI.Request.Wait(self)
        super()._report(status)

    def Free(self) -> None:
        super().Free()
        if MPI.Request.__bool__(self) and not self._broken:
            self._report(None)

    free = Free


# ------------------------------------------------------------------------------------------ the helper thread

_helper: threading.Thread | None = None
_ending = threading.Event()


def _start_helper() -> None:
    global _helper
    with progress_lock:
        if _helper is None and not _ending.is_set():
            _helper = threading.Thread(target=_run_helper, name="chorus-requests", daemon=True)
            _helper.start()


def _run_helper() -> None:
    global _helper
    pause, idle, seen = LONGEST_SLEEP, 0, progress_count()
    while idle < IDLE_CHECKS:
        time.sleep(pause)
        if _ending.is_set():
            return
        pause = LONGEST_SLEEP if pause > LONGEST_SLEEP / 2 else 2 * pause
        idle = 0 if active_requests else idle + 1
        if progress_count() != seen:  # the program makes progress itself
            seen, pause = progress_count(), LONGEST_SLEEP
        elif active_requests and _progressed():
            pause = SHORTEST_SLEEP
        if idle >= IDLE_CHECKS:
            with progress_lock:
                if not active_requests:
                    _helper = None
                    return
            idle = 0


def _progressed() -> bool:
    """Progress all active requests; True if one advanced. Their errors are kept for the threads that wait."""
    advanced = False
    with progress_lock:
        for request in tuple(active_requests):
            before = request.program.position
            try:
                request._advance()
            except BaseException as error:
                request.error = error
            advanced |= not request.active or request.program.position != before
    return advanced


def end_helper() -> None:
    _ending.set()
    helper = _helper
    if helper is not None:
        helper.join()
