"""Messages between two ranks of a process group, and the barrier that names missing ranks, by those of MPI."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.errors import InvalidArgument, Mismatch, Timeout
from collectives.runtime.execution.progress import orphans, progress_until
from collectives.torch.tensors import Block
from collectives.torch.work import NO_TIMEOUT, CompleteWork
from collectives.transport.waits import Deadline, Others


@contextmanager
def limited(seconds: float, rank: int, *memory: object) -> Iterator[None]:
    """Limit the waits of a ``with`` block. If it raises, keep `memory`: a message may still read or write it."""
    try:
        with Deadline(seconds, rank):
            yield
    except BaseException:
        orphans.append(memory)
        raise


SENT_AS_INT64 = torch.__version__ < (2, 13)
"""True if PyTorch's pipelines begin with messages that are sent as an int64 and received as a float32."""


class MessageWork(CompleteWork):
    """Handle of a message under way, from or to a block of memory. `run_wait` is called with a timeout to wait."""

    def __init__(self, block: Block, is_sent: bool, run_wait: Callable[..., None]) -> None:
        super().__init__([block.tensor])
        self._block, self._is_sent, self._run_wait = block, is_sent, run_wait
        self._bytes = self._room = block.array.reshape(-1).view(np.uint8)
        if SENT_AS_INT64 and not is_sent and block.tensor.shape == (1,) and block.tensor.dtype == torch.float32:
            self._room = np.empty(8, np.uint8)
        self._status, self._done = MPI.Status(), False
        self._error: MPI.Exception | None = None

    def start(self, call: Callable[..., MPI.Request], peer: int, tag: int) -> MessageWork:
        """Start it by `call`, a communicator's ``Isend`` or ``Irecv``."""
        self._peer = "any rank" if peer == MPI.ANY_SOURCE else f"rank {peer}"
        self._request = call([self._room, MPI.BYTE], peer, tag)
        return self

    def is_completed(self) -> bool:
        """Return True after the end of the message, or an error, which `wait` raises."""
        if not self._done:
            try:
                self._done = self._request.Test(self._status)
                if self._done and not self._is_sent:
                    self._store()
            except MPI.Exception as error:
                is_longer = error.Get_error_class() == MPI.ERR_TRUNCATE
                self._done, self._error = True, self._mismatch("more") if is_longer else error
        return self._done

    def _store(self) -> None:
        found, expected = self._status.Get_count(MPI.BYTE), self._bytes.nbytes
        if found in (expected, self._room.nbytes):
            if self._room is not self._bytes:
                self._bytes[:] = self._room[:expected]
            self._block.store()
        else:
            self._error = self._mismatch(found)

    def _mismatch(self, found: object) -> Mismatch:
        expected = f"a message of {self._bytes.nbytes} bytes from {self._peer}"
        return Mismatch(MPI.ERR_TRUNCATE, f"expected {expected}, found {found}: shapes or dtypes differ")

    def exception(self) -> BaseException | None:
        return self._error

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._run_wait(self, timeout.total_seconds())
        return True

    def source_rank(self) -> int:
        """Rank in the group from which the message came."""
        return self._status.Get_source()

    _source_rank = source_rank


class Messages:
    """Messages on a communicator, with PyTorch's tags."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._rank, self._size = comm, comm.Get_rank(), comm.Get_size()
        self._barrier_tag: int = comm.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]
        self._barriers = 0
        self._active: list[MessageWork] = []
        """Messages under way: the program may have dropped their handles."""

    def start(
        self, tensors: Sequence[torch.Tensor], peer: int, tag: int, sends: bool, timeout: float, guard: Any
    ) -> MessageWork:
        """Start to send tensors as one message to `peer`, or to receive them from it or from ``MPI.ANY_SOURCE``.

        Waits for it take `timeout` seconds at most, and are run by `guard`, a function (function, arguments).
        """
        if not 0 <= peer < self._size and (sends or peer != MPI.ANY_SOURCE):
            raise InvalidArgument(MPI.ERR_RANK, f"rank: expected 0 <= rank < {self._size}, found {peer}")
        if not 0 <= tag < self._barrier_tag:  # MPI's largest tag is of the barrier
            raise InvalidArgument(MPI.ERR_TAG, f"tag: expected 0 <= tag < {self._barrier_tag}, found {tag}")
        name = "any rank" if peer == MPI.ANY_SOURCE else f"rank {peer}"
        awaited = Others("message", f"to send to {name}" if sends else f"for a message from {name}")

        def wait(work: MessageWork, seconds: float) -> None:
            with limited(seconds if seconds > 0 else timeout, self._rank, work):
                progress_until(work.is_completed, awaited)
            self._forget_completed()
            if (error := work.exception()) is not None:
                raise error

        work = MessageWork(Block(tensors, sends), sends, lambda *arguments: guard(wait, *arguments))
        work.start(self._comm.Isend if sends else self._comm.Irecv, peer, tag)
        self._forget_completed()
        self._active.append(work)
        return work

    def _forget_completed(self) -> None:
        self._active = [each for each in self._active if not each.is_completed()]

    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None:
        """Barrier in which rank 0 waits for every rank, answers all, and names missing ones, in gloo's words."""
        self._barriers += 1
        answer = np.array([self._barriers])
        if self._rank == 0:
            self._await_all(timeout, wait_all_ranks)
            for rank in range(1, self._size):
                self._comm.Send(answer, rank, self._barrier_tag)
            return
        token = answer.copy()
        requests = [self._comm.Isend(token, 0, self._barrier_tag), self._comm.Irecv(answer, 0, self._barrier_tag)]
        try:
            with limited(timeout, self._rank, requests, token, answer):
                for request in requests:
                    progress_until(request.Test, Others("monitored_barrier", "for rank 0"))
        except Timeout as error:
            text = f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for"
            raise Timeout(MPI.ERR_PENDING, f"{text} send/recv from rank 0: {error}") from error

    def _await_all(self, timeout: float, wait_all_ranks: bool) -> None:
        missing, end = {*range(1, self._size)}, time.monotonic() + timeout
        token, status = np.zeros(1, np.int64), MPI.Status()
        while missing and time.monotonic() < end:
            if not self._comm.Iprobe(MPI.ANY_SOURCE, self._barrier_tag, status):
                time.sleep(1e-4)
                continue
            self._comm.Recv(token, status.Get_source(), self._barrier_tag)
            if token[0] == self._barriers:  # else of a barrier that has timed out
                missing.discard(status.Get_source())
        if missing:
            named = sorted(missing) if wait_all_ranks else sorted(missing)[:1]
            ranks = f"Rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} failed to pass monitoredBarrier"
            text = f"Rank 0 timed out in monitoredBarrier after {timeout * 1e3:.0f} ms: {ranks}"
            raise Timeout(MPI.ERR_PENDING, text)
