"""Handles of calls: complete ones, those of the thread that overlaps collectives, and of messages between two ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch.distributed import Work

from collectives.errors import Timeout
from collectives.runtime.execution.progress import orphans, progress_until
from collectives.torch.tensors import Block
from collectives.transport.waits import Deadline, Others

NO_TIMEOUT = timedelta(0)
"""Argument of `Work.wait` that leaves the time limit of the call."""


Guard = Callable[..., Any]


class CompleteWork(Work):
    """Handle of a collective that is complete, with its results."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True once the results are in the tensors."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Future with the list of results, which C++ code waits for."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.wait()
        future.set_result(self.result())
        return future

    def is_completed(self) -> bool:
        """Return True if `wait` would return at once."""
        return True

    def is_success(self) -> bool:
        """Return True if the call is complete without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Error of the call, if any."""
        return None

    def result(self) -> list[torch.Tensor]:
        """Tensors with the results."""
        return self._tensors

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()


DONE = CompleteWork()
"""Handle of every call that is not asynchronous, and so has no further use."""


class OverlappedWork(CompleteWork):
    """Handle of a collective in the hands of a `Worker`."""

    def __init__(self, tensors: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._run, self._done, self._error = run, threading.Event(), None
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def run(self) -> None:
        """Run the collective, in the worker's thread."""
        self._error: BaseException | None
        try:
            self._run()
        except Exception as error:
            self._error = error
        self._done.set()
        if self._error is None:
            self._future.set_result(self.result())
        else:
            self._future.set_exception(self._error)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        seconds = timeout.total_seconds() if timeout > NO_TIMEOUT else None
        if not self._done.wait(seconds):
            raise Timeout(MPI.ERR_PENDING, f"a collective that overlaps was not complete after {seconds} s")
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
    """Thread that runs collectives in the order in which they are submitted, on a communicator of its own."""

    def __init__(self) -> None:
        super().__init__(name="chorus torch overlap", daemon=True)
        self._queue: SimpleQueue[OverlappedWork | None] = SimpleQueue()
        self.start()

    def submit(self, work: OverlappedWork) -> None:
        self._queue.put(work)

    def run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()

    def close(self, seconds: float) -> bool:
        """End the thread after what was submitted; False if it has not ended after this time."""
        self._queue.put(None)
        self.join(seconds)
        return not self.is_alive()


@contextmanager
def kept_on_error(*memory: object) -> Iterator[None]:
    """Keep memory to the end of the program if the ``with`` block raises: a message may still read or write it."""
    try:
        yield
    except BaseException:
        orphans.append(memory)
        raise


class MessageWait(NamedTuple):
    """Time limit of waits for one message, and the text of their errors."""

    rank: int
    """This one, in the group."""
    purpose: str
    """Verb and object, such as "to send to rank 1"."""
    timeout: float
    """Seconds."""
    guard: Guard
    """Function that calls another one, and turns errors into PyTorch's."""


class MessageWork(CompleteWork):
    """Handle of a message under way, to or from another rank.

    `block` is its memory, of which a received copy is stored in the tensors.
    """

    def __init__(self, request: MPI.Request, block: Block, is_received: bool, wait: MessageWait) -> None:
        super().__init__([block.tensor])
        self._request, self._block, self._is_received, self._wait = request, block, is_received, wait
        self._status, self._done = MPI.Status(), False

    def _test(self) -> bool:
        if not self._done and self._request.Test(self._status):
            self._done = True
            if self._is_received:
                self._block.store()
        return self._done

    def _await(self, seconds: float) -> None:
        with Deadline(seconds, self._wait.rank), kept_on_error(self._request, self._block):
            progress_until(self._test, Others("message", self._wait.purpose))

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._wait.guard(self._await, timeout.total_seconds() if timeout > NO_TIMEOUT else self._wait.timeout)
        return True

    def is_completed(self) -> bool:
        return self._test()

    def source_rank(self) -> int:
        """Rank in the group from which the message came."""
        return self._status.Get_source()

    _source_rank = source_rank


class SeveralWork(CompleteWork):
    """Handle of several calls, such as the messages of a coalesced group."""

    def __init__(self, parts: Sequence[Work]) -> None:
        super().__init__()
        self._parts = parts

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return all([part.wait(timeout) for part in self._parts])

    def is_completed(self) -> bool:
        return all([part.is_completed() for part in self._parts])
