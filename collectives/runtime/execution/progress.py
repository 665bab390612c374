"""Progress of all active requests: by threads that wait, and by a progress thread while the program does other things.

MPI promises progress of an operation while its rank waits in any MPI call. A rank that is inside mpi4py (a receive, a
window, a file, `MPI.Request.Waitall`) calls nothing of this package, and other ranks may wait for its requests: the
progress thread advances them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from mpi4py import MPI

from collectives.engine.extension import engine
from collectives.engine.instructions import ATTEMPTS, HAS_THREAD, PROGRESS_WORDS
from collectives.transport.waits import NAP, Awaited, Others, Pauses

if TYPE_CHECKING:
    from collectives.runtime.execution.operation import Operation
    from collectives.runtime.execution.program import Program

LONGEST_SLEEP = 5e-3
"""Seconds between two checks of the progress thread while the program makes progress itself, or nothing progresses.

A check interrupts a program that computes on the core."""

SHORTEST_SLEEP = 2e-5
"""Seconds to the next check after progress. From then on, four times as long each time."""

NAPS = 10
"""Sleeps of the progress thread in one portion of a request, while it waits for other ranks: a millisecond in all."""

IDLE_CHECKS = 20
"""Consecutive checks without active requests, after which the progress thread rests until a request is started."""

REST = 0.5
"""Seconds of rest after which the progress thread ends."""

LONGEST_JOIN = 5
"""Seconds that the program waits for the thread at its exit: an operation of the user's may never return."""

YIELDS_OF_POLL = 10
"""Yields of the core, as `pause` counts them, that take about as long as one poll of active requests."""

active_requests: list[Operation] = []
"""Active requests of this process. Changed only while holding `progress_lock`, or in one step by compiled code."""

lone_requests: list[Operation] = []
"""Requests that a thread completes by itself, so that no other thread progresses them. Changed as `active_requests`."""

orphans: list[object] = []
"""Aborted requests and calls of all communicators: peers may still read and write their memory, up to the exit."""


class ProgramOwner(Protocol):
    """Interface of what made an operation.

    `rank` is this one's in the communicator, `timeout` the time limit of waits where none is given.
    """

    rank: int
    timeout: float | None

    def release(self, operation: Any) -> None:
        """Take back the program of a non-blocking request that has ended, or a persistent one that is freed."""

    def catch_up(self, operation: Any) -> None:
        """Advance the requests that an operation is queued behind."""


progress_words = np.zeros(PROGRESS_WORDS, np.int64)
"""Words of the process, which the engine shares."""

if engine is not None:
    engine.set_progress(active_requests, progress_words)

progress_lock = threading.RLock()
"""Held while active requests progress, which any thread may do for all others.

No thread waits for another rank while it holds this lock."""


def discard(requests: list[Operation], request: Operation) -> None:
    """Remove a request from a list, which compiled code and interrupting frames may change during comparisons."""
    while contains(requests, request):
        with suppress(ValueError):
            requests.remove(request)


def contains(requests: list[Operation], request: Operation) -> bool:
    """True if the request itself is in the list. Without a call of Python code, so that nothing interrupts it."""
    return id(request) in map(id, requests)


@cache
def mpi_is_thread_safe() -> bool:
    """True if the MPI allows calls from several threads at once."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def progress() -> None:
    """Progress all active requests without blocking. An error is kept for those who wait for its request."""
    with progress_lock:
        progress_words[ATTEMPTS] += 1
        for request in tuple(active_requests):
            try:
                request._advance()
            except Exception as error:
                request.error = error
    if progress_thread.portion.locked():  # it needs the GIL at the end of its portion, which polling would keep
        time.sleep(NAP)


class ActiveRequests:
    """All active requests and what one wait is for, so that the wait does not nap while any of them progresses."""

    def __init__(self, awaited: Awaited) -> None:
        self._awaited, self.describe, self.stall = awaited, awaited.describe, awaited.stall

    @property
    def moves(self) -> int:
        """Number that changes with progress."""
        return self._awaited.moves + request_moves()


def request_moves() -> int:
    """Number that changes with progress of any active request."""
    return sum(request.program.moves for request in tuple(active_requests))


def stall_requests(idle: float) -> list[BaseException]:
    """Let active requests look at the ranks they wait for, `idle` seconds without progress. Return their errors.

    Those abort requests, so that waits of mpi4py for them raise an error, too, without a text.
    """
    with progress_lock:
        requests = [one for one in active_requests if not one.is_queued]
        for request in requests:
            request.take_back()
            request._do(partial(request.program.stall, idle))
        return [request.error for request in requests if request.error is not None]


SOMETHING = Others("a wait")


def progress_until(done: Callable[[], bool], awaited: Awaited = SOMETHING) -> None:
    """Progress all active requests until `done` returns True, yielding the CPU in between. That is `awaited`."""
    pauses: Pauses | None = None
    while not done():
        progress()
        if done():
            return
        pauses = pauses or Pauses(ActiveRequests(awaited))
        pauses.pause(YIELDS_OF_POLL)


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

        progress_until(advance, program)


class ProgressThread:
    """Thread that advances active requests while the program does not. Errors are kept for those who wait for them.

    It is started with a request (`ensure`), and sleeps longer the longer nothing advances. Without active requests it
    soon rests, since checks take time from the program, and later ends. Compiled programs of long messages (`deferred`)
    run in portions, without the interpreter's lock (GIL) and without `progress_lock`, so that other threads compute and
    call other methods meanwhile; a portion ends when it has waited a millisecond for other ranks. If the MPI is not
    thread-safe, the thread advances only requests that are within the node, and leaves their completion to the program.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.portion = threading.Lock()
        """Held while the thread runs a portion of a request without `progress_lock`. Acquired before that lock."""

        self._alarm = threading.Lock()  # locked while the thread may sleep
        self._alarm.acquire()
        self._ending = False

    @property
    def is_current(self) -> bool:
        """True in the progress thread."""
        return self.thread is threading.current_thread()

    def ensure(self) -> None:
        """Start the thread unless it exists, or end its rest."""
        with progress_lock:
            if self._ending or progress_words[HAS_THREAD]:
                return
            rests = self.thread is not None
            if not rests:
                self.thread = threading.Thread(target=self._run, name="chorus-progress", daemon=True)
                self.thread.start()
            progress_words[HAS_THREAD] = 1
            if rests:
                self.wake()

    def wake(self) -> None:
        """Let the thread check now, before a call that blocks in MPI or after the start of work that it is to do."""
        with suppress(RuntimeError):  # it is awake already
            self._alarm.release()

    def end(self) -> None:
        """End the thread for good, as the program exits."""
        self._ending, thread = True, self.thread
        progress_words[HAS_THREAD] = 0
        self.wake()
        if thread is not None:
            thread.join(LONGEST_JOIN)

    def _run(self) -> None:
        pause, idle, seen = LONGEST_SLEEP, 0, progress_words[ATTEMPTS]
        while not self._ending:
            woken = self._alarm.acquire(timeout=pause)
            idle = 0 if active_requests else idle + 1
            if idle >= IDLE_CHECKS:
                if not self._rest():
                    return
                woken, idle = True, 0
            before, seen = seen, progress_words[ATTEMPTS]
            if not active_requests or (seen != before and not woken):  # or the program makes progress itself
                pause = LONGEST_SLEEP
            elif not self._ending:
                pause = SHORTEST_SLEEP if _advance_active() or woken else min(4 * pause, LONGEST_SLEEP)
                seen = progress_words[ATTEMPTS]  # calls that this thread has started are not the program's progress

    def _rest(self) -> bool:
        """Sleep until a request is started. False if none is, and the thread is to end."""
        with progress_lock:
            progress_words[HAS_THREAD] = 0  # first: compiled code that starts a request from here on calls `ensure`
            if active_requests:
                progress_words[HAS_THREAD] = 1
        end = time.monotonic() + REST
        while not progress_words[HAS_THREAD] and (left := end - time.monotonic()) > 0 and not self._ending:
            self._alarm.acquire(timeout=left)
        with progress_lock:
            if not progress_words[HAS_THREAD]:
                self.thread = None
            return self.thread is not None


def _advance_active() -> bool:
    """Advance all active requests in the progress thread. True if one moved."""
    moved, everything = False, mpi_is_thread_safe()
    with progress_lock:
        several = tuple(active_requests)
        for request in several:
            if not request.portioned:
                moved |= _has_moved(request, request._advance if everything else request._advance_within_node)
    naps = NAPS if len(several) == 1 else 0
    for request in several:
        if request.portioned:
            moved |= _has_moved(request, partial(_run_portion, request, naps))
    return moved


def _has_moved(request: Operation, advance: Callable[[], object]) -> bool:
    """Call `advance`. True if the request has moved. An error is kept for those who wait."""
    before = request.program.position
    try:
        advance()
    except BaseException as error:
        request.error = error
    return not request.active or request.program.position != before


def _run_portion(request: Operation, naps: int) -> None:
    """Run the program of a request, if it still is active, until it has slept `naps` times for other ranks."""
    with progress_thread.portion:
        with progress_lock:
            program = request.portioned
            if program is None:
                return
            request.in_thread = True
        result = program.advance_patiently(naps)
        with progress_lock:
            request._note(program, result)


progress_thread = ProgressThread()
"""The only one of the process."""


def _after_fork() -> None:
    """Forget requests and thread in a forked process, which has no part in them."""
    active_requests.clear()
    lone_requests.clear()
    progress_words[HAS_THREAD] = 0
    progress_thread.thread, progress_thread.portion = None, threading.Lock()
    progress_lock.release()


if hasattr(os, "register_at_fork"):  # a lock that another thread holds would stay locked in the new process
    os.register_at_fork(before=progress_lock.acquire, after_in_parent=progress_lock.release, after_in_child=_after_fork)
