"""Non-blocking collectives as requests of the MPI, so that mpi4py's functions on lists of requests take them.

`MPI.Request.Waitall` and its like are C: they take the handle out of every object of a list and pass all handles to the
MPI. A `NativeRequest` is an `MPI.Request` whose handle is that of a generalized request, which is completed when the
collective is over. While a thread waits inside the MPI, nothing of this package is called by it, so a helper thread
moves what is under way. It moves nothing while the program does so itself, and ends when nothing is under way.
"""

# mypy: disable-error-code="misc"
# Methods of the two base classes differ in what mpi4py's lower-case spellings return.

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from mpi4py import MPI

from collectives.runtime import requests
from collectives.runtime.program import Program
from collectives.runtime.requests import Request, active_requests, progress_lock

LONGEST_NAP = 1e-3
"""Seconds between two looks of the helper thread, while the program moves its operations itself or nothing moves."""

SHORTEST_NAP = 2e-5
"""Seconds between two looks after one at which something moved."""

IDLE_NAPS = 500
"""Looks in a row that find nothing under way, after which the helper thread ends."""


@cache
def available() -> bool:
    """True if the MPI allows several threads at once, which the helper thread requires."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def new_request(name: str, program: Program, release: Callable[[Request, Program], None], keep: object) -> Request:
    """A request of a non-blocking collective; native if the MPI allows the helper thread."""
    return (NativeRequest if available() else Request)(name, program, release, keep)


class NativeRequest(Request, MPI.Request):
    """A non-blocking collective whose handle any function of mpi4py on requests can wait for, alone or in lists.

    Its own `Wait` and `Test` move it in this thread, which is faster.
    """

    def __new__(cls, *_: Any) -> NativeRequest:
        """With the handle of a new generalized request."""
        troubles: list[BaseException] = []
        generalized = MPI.Grequest.Start(_query, None, None, (troubles,))
        self = MPI.Request.__new__(cls, generalized)
        self._generalized, self._troubles = generalized, troubles
        return self

    _generalized: MPI.Grequest
    _troubles: list[BaseException]

    def __bool__(self) -> bool:
        return MPI.Request.__bool__(self)

    def begin(self, gate: Callable[[], bool] | None) -> None:
        super().begin(gate)
        if self._active:
            _help()

    def _ended(self) -> None:
        super()._ended()
        if self._broken:
            self._troubles.append(RuntimeError(repr(self)))
        self._generalized.Complete()

    def _report(self, status: MPI.Status | None) -> None:
        """Give the handle back to the MPI, which fills the status."""
        MPI.Request.Wait(self, status)

    def Free(self) -> None:
        """Give back what the request holds; it must not be under way and cannot be used again."""
        super().Free()
        if MPI.Request.__bool__(self) and not self._troubles:
            self._report(None)

    free = Free


def _query(status: MPI.Status, troubles: list[BaseException]) -> None:
    """Called by the MPI when a thread has waited for the handle. The status is that of a collective already."""
    if troubles:
        raise MPI.Exception(MPI.ERR_OTHER)


# ------------------------------------------------------------------------------------------ the helper thread

_helper: threading.Thread | None = None
_ending = threading.Event()


def _help() -> None:
    """Start the helper thread, if there is none."""
    global _helper
    with progress_lock:
        if _helper is None and not _ending.is_set():
            _helper = threading.Thread(target=_move, name="chorus-requests", daemon=True)
            _helper.start()


def _move() -> None:
    global _helper
    nap, idle, seen = LONGEST_NAP, 0, requests.progress_count()
    while idle < IDLE_NAPS:
        time.sleep(nap)
        if _ending.is_set():
            return
        nap, idle = LONGEST_NAP if nap > LONGEST_NAP / 2 else 2 * nap, 0 if active_requests else idle + 1
        if requests.progress_count() != seen:  # the program calls this package, which moves all that is under way
            seen, nap = requests.progress_count(), LONGEST_NAP
        elif active_requests and _moved():
            nap = SHORTEST_NAP
        if idle >= IDLE_NAPS:
            with progress_lock:
                if not active_requests:
                    _helper = None
                    return
            idle = 0


def _moved() -> bool:
    """Move all that is under way; whether anything got further. Errors are kept for the threads that wait."""
    moved = False
    with progress_lock:
        for request in tuple(active_requests):
            before = request.program.position
            try:
                request._advance()
            except BaseException as error:
                request.fail(error)
            moved |= not request.active or request.program.position != before
    return moved


def end_help() -> None:
    """End the helper thread for good: to be called before the MPI ends."""
    _ending.set()
    helper = _helper
    if helper is not None:
        helper.join()
