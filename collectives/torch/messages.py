"""Messages between two ranks of a process group, and the barrier that names missing ranks, over MPI's messages."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.errors import InvalidArgument, Timeout
from collectives.runtime.execution.progress import progress_until
from collectives.torch.tensors import Block
from collectives.torch.work import Guard, MessageWait, MessageWork, kept_on_error
from collectives.transport.waits import Deadline, Others

BARRIER_ROOT = 0


class Messages:
    """Point-to-point messages on a communicator, with PyTorch's tags."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._rank, self._size = comm, comm.Get_rank(), comm.Get_size()
        self._barrier_tag = comm.Get_attr(MPI.TAG_UB)
        self._barriers = 0
        self._active: list[MessageWork] = []
        """Messages under way: the program may have dropped their handles."""

    def send(
        self, tensors: Sequence[torch.Tensor], dst: int, tag: int, timeout: float, guard: Guard
    ) -> MessageWork:
        """Start to send tensors as one message. Waits for it take `timeout` seconds at most, and `guard` runs them."""
        self._check(dst, tag)
        block = Block(tensors)
        request = self._comm.Isend([block.array.view(np.uint8), MPI.BYTE], dst, tag)
        wait = MessageWait(self._rank, f"to send to rank {dst}", timeout, guard)
        return self._kept(MessageWork(request, block, False, wait))

    def receive(
        self, tensors: Sequence[torch.Tensor], src: int, tag: int, timeout: float, guard: Guard
    ) -> MessageWork:
        """Start to receive tensors as one message, from a rank or ``MPI.ANY_SOURCE``."""
        if src != MPI.ANY_SOURCE:
            self._check(src, tag)
        block = Block(tensors, load=False)
        request = self._comm.Irecv([block.array.view(np.uint8), MPI.BYTE], src, tag)
        sender = "any rank" if src == MPI.ANY_SOURCE else f"rank {src}"
        wait = MessageWait(self._rank, f"for a message from {sender}", timeout, guard)
        return self._kept(MessageWork(request, block, True, wait))

    def _kept(self, work: MessageWork) -> MessageWork:
        self._active = [each for each in self._active if not each.is_completed()]
        self._active.append(work)
        return work

    def _check(self, rank: int, tag: int) -> None:
        if not 0 <= rank < self._size:
            raise InvalidArgument(MPI.ERR_RANK, f"rank: expected 0 <= rank < {self._size}, found {rank}")
        if not 0 <= tag < self._barrier_tag:
            raise InvalidArgument(MPI.ERR_TAG, f"tag: expected 0 <= tag < {self._barrier_tag}, found {tag}")

    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None:
        """Barrier in which rank 0 waits for every rank, answers all, and names missing ones, in gloo's words."""
        self._barriers += 1
        if self._rank != BARRIER_ROOT:
            token, answer = np.array([self._barriers]), np.zeros(1, np.int64)
            requests = [self._comm.Isend(token, BARRIER_ROOT, self._barrier_tag)]
            requests += [self._comm.Irecv(answer, BARRIER_ROOT, self._barrier_tag)]
            with Deadline(timeout, self._rank), kept_on_error(requests, token, answer):
                self._await_root(requests)
            return
        missing, end = set(range(1, self._size)), time.monotonic() + timeout
        token, status = np.zeros(1, np.int64), MPI.Status()
        while missing and time.monotonic() < end:
            if self._comm.Iprobe(MPI.ANY_SOURCE, self._barrier_tag, status):
                self._comm.Recv(token, status.Get_source(), self._barrier_tag)
                if token[0] == self._barriers:  # else of a barrier that has timed out
                    missing.discard(status.Get_source())
            else:
                time.sleep(1e-4)
        if missing:
            named = sorted(missing) if wait_all_ranks else sorted(missing)[:1]
            ranks = f"Rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} failed to pass monitoredBarrier"
            text = f"Rank {self._rank} timed out in monitoredBarrier after {timeout * 1e3:.0f} ms: {ranks}"
            raise Timeout(MPI.ERR_PENDING, text)
        for request in [self._comm.Isend(token, rank, self._barrier_tag) for rank in range(1, self._size)]:
            self._await(request)

    def _await_root(self, requests: Sequence[MPI.Request]) -> None:
        try:
            for request in requests:
                self._await(request)
        except Timeout as error:
            text = f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for"
            raise Timeout(MPI.ERR_PENDING, f"{text} send/recv from rank {BARRIER_ROOT}: {error}") from error

    def _await(self, request: MPI.Request) -> None:
        progress_until(request.Test, Others("monitored_barrier", f"for rank {BARRIER_ROOT}"))
