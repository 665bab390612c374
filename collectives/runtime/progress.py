"""Progress of all active requests, while any thread of this process waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from collectives.runtime.program import Program
from collectives.transport.wire import pause

if TYPE_CHECKING:
    from collectives.runtime.requests import Request

Result = TypeVar("Result")

active_requests: list[Request] = []
"""Active requests of this process; changed only while holding `progress_lock`."""

progress_lock = threading.RLock()
"""Held while active requests progress, which any thread may do for all others.

No thread waits for another rank while it holds this lock."""

_progress_count = 0


def progress_count() -> int:
    return _progress_count


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
        with_progress_thread(program.run)
    else:
        with progress_lock:
            program.start()

        def advance() -> bool:
            with progress_lock:
                return program.advance()

        progress_until(advance)


def with_progress_thread(call: Callable[[], Result]) -> Result:
    """Run a call that blocks in MPI, return its result; a thread progresses active requests. Needs THREAD_MULTIPLE."""
    over, errors = threading.Event(), []

    def progress_active() -> None:
        try:
            turn = 0
            while active_requests and not over.is_set():
                progress()
                pause(turn := turn + 1)
        except BaseException as error:  # of a reduction, say: raised in the calling thread
            errors.append(error)

    thread = threading.Thread(target=progress_active, name="chorus-progress", daemon=True)
    thread.start()
    try:
        result = call()
    finally:
        over.set()
        thread.join()
    for error in errors:
        raise error
    return result
