"""End of a program: orderly, or by an uncaught exception, after which the job is aborted without a collective.

Other ranks do not learn of an exception on this one and may wait for it in any collective. Python runs the functions of
`atexit` after an uncaught exception too, and neither a collective there nor MPI_Finalize would return. mpi4py calls
MPI_Abort in place of MPI_Finalize where an abort status was set (``python -m mpi4py`` sets one); here one is set for
every program that imports this package.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any

from mpi4py import MPI

PATIENCE = 0.5
"""Seconds that other threads have to leave their collectives after the main thread has failed."""

PERIOD = 0.01
"""Seconds between two looks at them."""

_set_in_mpi4py = getattr(MPI, "_set_abort_status")  # noqa: B009 (mpi4py's stubs do not have it)
_print_traceback = sys.excepthook
_abort_status = 0


def _set_abort_status(status: int) -> None:
    """In place of mpi4py's function of this name: set the status, and remember it for `abort_status`."""
    global _abort_status
    _abort_status = status
    _set_in_mpi4py(status)


def abort_status() -> int:
    """Status that the job is to be aborted with; 0 if this process ends in an orderly way.

    To be called by functions of `atexit`. A program that ends by ``sys.exit(status)`` does so in an orderly way, since
    all ranks may; under ``python -m mpi4py`` it does not if the status is an error.
    """
    if not _abort_status and _is_uncaught(getattr(sys, "last_traceback", None)):
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        _set_abort_status(_status_of(error))
    return _abort_status


def _status_of(error: BaseException | None) -> int:
    """Exit status for an exception: as a shell has it for Ctrl-C, and as Python has it for all others."""
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _is_uncaught(traceback: TracebackType | None) -> bool:
    """True if a printed exception ends this process.

    One that has passed every frame has a traceback that begins at a frame without a caller. Others are printed in
    interactive sessions, which go on, and by programs such as pytest, which record what they have caught in the
    variables that the interpreter uses.
    """
    interactive = hasattr(sys, "ps1") or sys.flags.interactive
    return traceback is not None and traceback.tb_frame.f_back is None and not interactive


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
    """Print the traceback as before, and do not let threads that wait for other ranks keep the process alive."""
    try:
        return _print_traceback(kind, error, traceback)
    finally:
        if threading.current_thread() is threading.main_thread() and _is_uncaught(traceback):
            _await_threads(_status_of(error))


def _await_threads(status: int) -> None:
    """Wait for threads in collectives; abort if some stay there. The interpreter waits for all threads, in vain."""
    deadline = time.monotonic() + PATIENCE
    while _threads_in_collectives() and not MPI.Is_finalized():
        if time.monotonic() > deadline:
            _flush()
            MPI.COMM_WORLD.Abort(status)
        time.sleep(PERIOD)


def _threads_in_collectives() -> bool:
    """True if a non-daemon thread is inside this package."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            frame = frames.get(thread.ident or 0)
            while frame is not None:
                if frame.f_globals.get("__package__", "").partition(".")[0] == __package__.partition(".")[0]:
                    return True
                frame = frame.f_back
    return False


def _flush() -> None:
    """Write out what was printed: MPI_Abort ends the process without that."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # there is none, nobody reads it any more, or it was closed
            continue


setattr(MPI, "_set_abort_status", _set_abort_status)  # noqa: B010
sys.excepthook = _hook
