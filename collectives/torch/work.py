"""Handles of calls: complete ones, and those of the thread that overlaps collectives."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import Work

from collectives.communicator import Communicator
from collectives.errors import RanksDisagree, Timeout
from collectives.runtime.requests.program_end import PATIENCE, uncaught_exception
from collectives.transport.waits import watchers

LONGEST_CLOSE = 5.0
"""Seconds that the end of a group, or of the program, waits for the calls of its thread."""

LONGEST_STOP = 5.0
"""Seconds that the thread then has to leave the call that it is in. A wait of long looks every 3 s."""

NO_TIMEOUT = timedelta(0)
"""Argument of `Work.wait` that leaves the time limit of the call."""


class CompleteWork(Work):
    """Handle of a collective that is complete, with the tensors that hold its results."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True once the results are in the tensors. Raise the error of the call, or of the time limit."""
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Future of the list of results, which C++ code waits for."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors


HOLDS_HANDLES = torch.__version__ >= (2, 9)
"""True if PyTorch's C++ code keeps a handle's Python object. Without that object it waits for ever."""


def complete(tensors: Sequence[torch.Tensor]) -> Work:
    """Handle of a collective that is complete, one of PyTorch's own where C++ code keeps no other."""
    work = CompleteWork(tensors)
    return work if HOLDS_HANDLES else torch._C._distributed_c10d._create_work_from_future(work.get_future())


DONE = CompleteWork()
"""Handle of every call that is not asynchronous, and so has no further use."""


class OverlappedWork(CompleteWork):
    """Handle of a collective in the hands of a `Worker`, which calls `run`."""

    def __init__(self, tensors: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._run, self._done = run, threading.Event()
        self._error: BaseException | None = None
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        # C++ code sees the error of a callback, but takes that of `set_exception` for a value
        self._future = self._ended.then(self._outcome)

    def _outcome(self, _: torch.futures.Future[None]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._error = error
        self._done.set()
        self._ended.set_result(None)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self._done.wait(timeout.total_seconds() if timeout > NO_TIMEOUT else None):
            raise Timeout(MPI.ERR_PENDING, f"a call that overlaps was not complete after {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        return self._error


class Worker(threading.Thread):
    """Thread that runs collectives on a communicator of its own, in the order in which they are submitted."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(name="chorus torch overlap", daemon=True)
        self.comm = comm
        self._queue: SimpleQueue[OverlappedWork | None] = SimpleQueue()
        self._recent: deque[OverlappedWork] = deque(maxlen=0 if HOLDS_HANDLES else 256)
        self.start()

    def submit(self, work: OverlappedWork) -> OverlappedWork:
        self._recent.append(work)
        self._queue.put(work)
        return work

    def run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()

    def close(self, seconds: float = LONGEST_CLOSE) -> bool:
        """End the thread after all that was submitted, or at an error in its waits after this time. False if neither.

        The communicator raises errors from then on.
        """
        self._queue.put(None)
        self.join(seconds)
        if self.is_alive():
            watchers.append(self._leave)
            self.join(LONGEST_STOP)
            watchers.remove(self._leave)
        return not self.is_alive()

    def _leave(self) -> None:
        if threading.current_thread() is self:
            raise RanksDisagree(MPI.ERR_PENDING, "the process group has ended before the call")


def _close_all() -> None:
    """End the threads of groups that the program has not destroyed.

    The interpreter would end them where they next need its lock. In C++ code that aborts the process.
    """
    for thread in threading.enumerate():
        if isinstance(thread, Worker):
            thread.close(LONGEST_CLOSE if uncaught_exception() is None else PATIENCE)


atexit.register(_close_all)  # called before that of `collectives.communicator`, which was registered first


class SeveralWork(CompleteWork):
    """Handle of several calls."""

    def __init__(self, parts: Sequence[Work]) -> None:
        super().__init__()
        self._parts = parts

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return all([part.wait(timeout) for part in self._parts])

    def is_completed(self) -> bool:
        return all([part.is_completed() for part in self._parts])
