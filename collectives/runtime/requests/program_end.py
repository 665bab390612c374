"""Exit of the Python program: communicators are released. After an uncaught exception the job is aborted instead.

Other ranks do not learn of an exception on this one and may wait for it in any collective. Python runs the functions of
`atexit` after an uncaught exception too, and neither a collective there nor MPI_Finalize would return. mpi4py calls
MPI_Abort in place of MPI_Finalize where an abort status was set (``python -m mpi4py`` sets one); here one is set for
every program that imports this package.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from traceback import walk_stack
from types import TracebackType
from typing import Any

from mpi4py import MPI

from collectives.errors import InvalidArgument, Mismatch
from collectives.runtime.execution.progress import progress, progress_thread
from collectives.runtime.record.watcher import current_causes, current_unmatched_call
from collectives.runtime.record.writer import record
from collectives.runtime.requests.native_requests import free_unused_handles

PATIENCE = 0.5
"""Seconds that other threads have to leave their collectives after the main thread has failed."""

NOTICED = 3.0
"""Seconds in which waiting ranks notice that this one has left."""

QUIET = 0.1
"""Seconds without any thread in a collective after which they count as left: a thread may be between two of them."""

open_communicators: dict[int, Any] = {}
"""Communicators that hold resources, by order of creation."""

if hasattr(os, "register_at_fork"):  # a forked process has no part in them
    os.register_at_fork(after_in_child=open_communicators.clear)

_set_in_mpi4py = getattr(MPI, "_set_abort_status")  # noqa: B009 (mpi4py's stubs do not have it)
_finalize_mpi = MPI.Finalize
_print_traceback = sys.excepthook
_abort_status = 0


def close_all() -> None:
    """Release all communicators at exit, so that MPI reports no leaks. No-op if an exception aborts the job."""
    progress_thread.end()
    free_unused_handles()
    if MPI.Is_finalized() or not MPI.Is_initialized() or (_has_peers() and _aborts()):
        note_end(uncaught_exception())
        return  # mpi4py aborts the job, as other ranks may be waiting for this one in another call
    for comm in list(open_communicators.values()):
        try:
            comm.close()
        except Mismatch as error:
            _report_at_exit(error, comm._closing.transports.number)
    _finish_active()
    note_end(uncaught_exception())
    for comm in list(open_communicators.values()):
        text = f"{comm._closing.active} collectives are still under way"
        sys.excepthook(InvalidArgument, InvalidArgument(MPI.ERR_PENDING, text), None)
        comm._release()


def note_end(error: BaseException | None) -> None:
    """Note in the record, once, that this rank makes no more calls. If it fails, print how, and which ranks wait."""
    if (found := record()) is not None and not found.has_ended:
        found.end(error)
        for text in current_causes(ended=True) if error is not None or _abort_status else ():
            print(f"chorus: {text}", file=sys.stderr)


def _finish_active() -> None:
    """Progress operations that the program has not waited for, as long as some end."""
    left, end = -1, 0.0
    while open_communicators:
        progress()
        active = sum(comm._closing.active for comm in open_communicators.values())
        if active != left:
            left, end = active, time.monotonic() + PATIENCE
        elif time.monotonic() > end:
            return


def _report_at_exit(error: Exception, communicator: int) -> None:
    """Print an error, or the call that explains it, and let mpi4py end the program with status 1 for it.

    Others may wait for this rank, which has left before them: they have the time to raise `PeerLeft`.
    """
    text, _ = current_unmatched_call(communicator)
    if text:
        print(f"chorus: {text}", file=sys.stderr)
    else:
        sys.excepthook(type(error), error, None)
    _set_abort_status(1)
    note_end(uncaught_exception())
    end = time.monotonic() + NOTICED
    while current_unmatched_call(communicator)[1] and time.monotonic() < end:
        time.sleep(0.05)
    for stream in (sys.stdout, sys.stderr):  # MPI_Abort does not flush them
        with suppress(AttributeError, OSError, ValueError):  # absent, broken or closed
            stream.flush()


def _finalize() -> None:
    """Replacement of ``MPI.Finalize``: release all communicators first. Raise if collectives are under way."""
    if not MPI.Is_finalized():
        under_way = sum(comm._planner.active for comm in open_communicators.values() if comm._planner is not None)
        if under_way:
            text = f"MPI.Finalize: {under_way} collectives are still under way: wait for their requests first"
            raise InvalidArgument(MPI.ERR_PENDING, text)
        close_all()
    _finalize_mpi()


def _has_peers() -> bool:
    if MPI.COMM_WORLD.Get_size() > 1 or MPI.Comm.Get_parent() != MPI.COMM_NULL:
        return True
    return any(comm._size > 1 for comm in open_communicators.values())


def _set_abort_status(status: int) -> None:
    """Replacement of mpi4py's function of this name that also records the status."""
    global _abort_status
    _abort_status = status
    _set_in_mpi4py(status)


def _aborts() -> bool:
    """True if mpi4py is to abort the job at exit. Sets its abort status after an uncaught exception.

    ``sys.exit(status)`` is an orderly end, since all ranks may call it; under ``python -m mpi4py`` it is not if the
    status is an error.
    """
    if not _abort_status and (error := uncaught_exception()) is not None:
        _set_abort_status(_status_of(error))
    return bool(_abort_status)


def uncaught_exception() -> BaseException | None:
    """Exception that ends the process, at its exit. None for an orderly end."""
    if not _is_uncaught(getattr(sys, "last_traceback", None)):
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _status_of(error: BaseException | None) -> int:
    """Exit status after an uncaught exception: 130 for Ctrl-C, as in a shell, 1 for all others."""
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _is_uncaught(traceback: TracebackType | None) -> bool:
    """True if the exception with this traceback was not caught and ends the process. False in interactive sessions."""
    # An exception that has passed every frame has a traceback that begins at a frame without a caller. Others are
    # printed in interactive sessions and by programs such as pytest, which set the interpreter's variables too.
    interactive = hasattr(sys, "ps1") or sys.flags.interactive
    return traceback is not None and traceback.tb_frame.f_back is None and not interactive


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
    """Replacement of `sys.excepthook`: print the traceback, then abort if threads remain blocked in collectives."""
    try:
        return _print_traceback(kind, error, traceback)
    finally:
        if threading.current_thread() is threading.main_thread() and _is_uncaught(traceback):
            _await_threads(_status_of(error))


def _noting(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replacement of a hook for exceptions of threads, or of functions called at the exit: they are in the record.

    One that has left a collective lets the program end with an error.
    """

    def note(arguments: Any) -> Any:
        if arguments.exc_value is not None and (found := record()) is not None:
            found.note_error(arguments.exc_value)
        if getattr(arguments.exc_value, "left_collective", False):
            _set_abort_status(1)
        return hook(arguments)

    return note


def _await_threads(status: int) -> None:
    """Abort if threads do not leave their collectives, or return to them: the interpreter would wait for them."""
    try:
        remain = _threads_remain()
    except KeyboardInterrupt:  # Ctrl-C again
        remain = True
    if remain:
        _abort(status)
    threading.Thread(target=_watch_threads, args=(status,), daemon=True).start()


def _watch_threads(status: int) -> None:
    """Abort once a thread that the interpreter waits for stays in a collective: it may have been outside for long."""
    while _other_threads():
        if _threads_remain():
            _abort(status)


def _abort(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):  # MPI_Abort does not flush them
        with suppress(AttributeError, OSError, ValueError):  # absent, broken or closed
            stream.flush()
    MPI.COMM_WORLD.Abort(status)


def _threads_remain() -> bool:
    """Wait up to `PATIENCE` seconds for threads to leave their collectives for `QUIET` seconds. True if not."""
    start = latest = now = time.monotonic()
    while (others := _other_threads()) and not MPI.Is_finalized() and now - latest <= QUIET:
        if now - start > PATIENCE:
            return True
        time.sleep(0.005)
        now = time.monotonic()
        if _in_collectives(others):
            latest = now
    return False


def _other_threads() -> set[int | None]:
    """Threads that the interpreter waits for at its end."""
    return {thread.ident for thread in threading.enumerate() if not thread.daemon} - {threading.main_thread().ident}


def _in_collectives(threads: set[int | None]) -> bool:
    """True if one of these threads runs code of this package."""
    stacks = [walk_stack(frame) for ident, frame in sys._current_frames().items() if ident in threads]
    modules = [frame.f_globals.get("__package__") or "" for stack in stacks for frame, _ in stack]
    return any(module.partition(".")[0] == __package__.partition(".")[0] for module in modules)


setattr(MPI, "_set_abort_status", _set_abort_status)  # noqa: B010
sys.excepthook = _hook
threading.excepthook, sys.unraisablehook = _noting(threading.excepthook), _noting(sys.unraisablehook)
setattr(MPI, "Finalize", _finalize)  # noqa: B010
