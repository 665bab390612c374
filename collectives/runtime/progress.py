"""Progress of all active requests: by threads that wait, and by a progress thread while the program does other things.

MPI promises progress of an operation while its rank waits in any MPI call. A rank that is inside mpi4py (a receive, a
window, a file, `MPI.Request.Waitall`) calls nothing of this package, and other ranks may wait for its requests: the
progress thread advances them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from mpi4py import MPI

from collectives.runtime.program import Program
from collectives.transport.wire import pause

if TYPE_CHECKING:
    from collectives.runtime.requests import Request

LONGEST_SLEEP = 1e-3
"""Seconds between two checks of the progress thread while the program makes progress itself, or nothing progresses."""

SHORTEST_SLEEP = 2e-5
"""Seconds to the next check after progress."""

IDLE_CHECKS = 500
"""Consecutive checks without active requests, after which the progress thread ends."""

active_requests: list[Request] = []
"""Active requests of this process; changed only while holding `progress_lock`."""

progress_lock = threading.RLock()
"""Held while active requests progress, which any thread may do for all others.

No thread waits for another rank while it holds this lock."""

_progress_count = 0


@cache
def mpi_is_thread_safe() -> bool:
    """True if the MPI allows calls from several threads at once."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def progress() -> None:
    """Progress all active requests without blocking; an error in one of them is raised here."""
    global _progress_count
    with progress_lock:
        _progress_count += 1
        for request in tuple(active_requests):
            request._advance()


def progress_until(done: Callable[[], bool]) -> None:
    """Progress all active requests until `done` returns True, yielding the CPU in between."""
    turn = 0
    while not done():
        progress()
        if done():
            return
        pause(turn := turn + 1)


def run_program(program: Program) -> None:
    """Run a program to its end, with progress of all active requests meanwhile.

    These may belong to the same communicator, and another thread may progress them: state that they share with this
    program, such as messages queued for room, is changed only while holding `progress_lock`. Without active requests no
    other thread can start one on this communicator before the program has ended.
    """
    if not active_requests:
        program.run()
    elif program.waits_in_mpi:
        progress_thread.wake()
        program.run()
    else:
        with progress_lock:
            program.start()

        def advance() -> bool:
            with progress_lock:
                return program.advance()

        progress_until(advance)


class ProgressThread:
    """Thread that advances active requests while the program does not. Errors are kept for those who wait for them.

    It is started with a request (`ensure`, while holding `progress_lock`), ends after half a second without active
    requests, and sleeps longer the longer nothing advances. If the MPI is not thread-safe, it advances only requests
    that are within the node, and leaves their completion to the program.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._alarm = threading.Lock()  # locked while the thread may sleep
        self._alarm.acquire()
        self._ending = False

    def ensure(self) -> None:
        """Start the thread unless it exists; the caller holds `progress_lock`."""
        if self.thread is None and not self._ending:
            self.thread = threading.Thread(target=self._run, name="chorus-progress", daemon=True)
            self.thread.start()

    def wake(self) -> None:
        """Let the thread check now, before a call that blocks in MPI or after the start of work that it is to do."""
        with suppress(RuntimeError):  # it is awake already
            self._alarm.release()

    def end(self) -> None:
        """End the thread for good, as the program exits."""
        self._ending, thread = True, self.thread
        self.wake()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        pause, idle, seen = LONGEST_SLEEP, 0, _progress_count
        while not self._ending and not (idle >= IDLE_CHECKS and self._retired()):
            woken = self._alarm.acquire(timeout=pause)
            idle = 0 if active_requests else idle + 1
            pause = SHORTEST_SLEEP if woken else min(2 * pause, LONGEST_SLEEP)
            if _progress_count != seen and not woken:  # the program makes progress itself
                seen, pause = _progress_count, LONGEST_SLEEP
            elif active_requests and not self._ending and _advance_active():
                pause = SHORTEST_SLEEP

    def _retired(self) -> bool:
        """Forget the thread, which is to end, unless a request has become active."""
        with progress_lock:
            if not active_requests:
                self.thread = None
            return not active_requests


def _advance_active() -> bool:
    """Advance all active requests in the progress thread; True if one moved. Errors are kept for those who wait."""
    moved, everything = False, mpi_is_thread_safe()
    with progress_lock:
        for request in tuple(active_requests):
            before = request.program.position
            try:
                if everything:
                    request._advance()
                else:
                    request._advance_within_node()
            except BaseException as error:
                request.error = error
            moved |= not request.active or request.program.position != before
    return moved


progress_thread = ProgressThread()
"""The only one of the process."""


def _after_fork() -> None:
    """Forget requests and thread in a forked process, which has no part in them."""
    active_requests.clear()
    progress_thread.thread = None
    progress_lock.release()


if hasattr(os, "register_at_fork"):  # a lock that another thread holds would stay locked in the new process
    os.register_at_fork(before=progress_lock.acquire, after_in_parent=progress_lock.release, after_in_child=_after_fork)
