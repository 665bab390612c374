"""Quantised collectives of many simulated ranks in one process: each rank's real code, messages as copies.

allreduces = [TwoShotAllreduce(comm, count, codec) for comm in simulated_comms(64)]
run_in_lockstep([allreduce.allreduce(x, out) for allreduce, x, out in ...])
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.compressed import Motion

Move = Callable[[dict[int, Any]], None]
"""Function that performs a collective on the messages of all ranks, given by rank."""


class InProcessRequest:
    """Request of one simulated rank for a collective; complete as soon as all ranks have started theirs."""

    def __init__(self, comm: InProcessComm, message: Any, move: Move):
        self.comm, self.message, self.move = comm, message, move
        self.over = False

    def Start(self) -> None:
        self.over = False
        call = self.comm.calls[next(self.comm.numbers)]
        call[self.comm.Get_rank()] = self
        if len(call) == self.comm.Get_size():
            self.move({rank: request.message for rank, request in call.items()})
            for request in call.values():
                request.over = True

    def Test(self) -> bool:
        return self.over

    def Free(self) -> None:
        """No-op."""


def _all_to_all(messages: dict[int, Any]) -> None:
    for target, (_, into) in messages.items():
        for source, (out, _) in messages.items():
            _part(into, source)[...] = _part(out, target)


def _in_place(op: MPI.Op, messages: dict[int, np.ndarray]) -> None:
    total = (np.add if op == MPI.SUM else np.maximum).reduce(list(messages.values()))
    for message in messages.values():
        message[...] = total


def _part(message: Any, rank: int) -> np.ndarray:
    wire, sizes, places, _ = message
    part: np.ndarray = wire[places[rank] : places[rank] + sizes[rank]]
    return part


class InProcessComm:
    """Communicator of one simulated rank, with the methods that quantised collectives use; calls match by order."""

    nodes = None

    def __init__(self, size: int, rank: int, calls: dict[int, dict[int, InProcessRequest]]):
        self._size, self._rank, self.calls, self.numbers = size, rank, calls, count()

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def empty(self, shape: Any, dtype: Any, like: None = None) -> np.ndarray:
        return np.empty(shape, dtype)

    def Iallreduce(self, sent: Any, received: np.ndarray, op: MPI.Op) -> InProcessRequest:
        (request := InProcessRequest(self, received, partial(_in_place, op))).Start()
        return request

    def Alltoallv_init(self, sent: Any, received: Any) -> InProcessRequest:
        return InProcessRequest(self, (sent, received), _all_to_all)

    def Ialltoallv(self, sent: Any, received: Any) -> InProcessRequest:
        (request := self.Alltoallv_init(sent, received)).Start()
        return request

    def Allgatherv_init(self, sent: Any, received: Any) -> InProcessRequest:
        wire, sizes, places, kind = received
        mine = [wire, [sizes[self._rank]] * self._size, [places[self._rank]] * self._size, kind]
        return self.Alltoallv_init(mine, received)


def simulated_comms(size: int) -> list[Any]:
    calls: dict[int, dict[int, InProcessRequest]] = defaultdict(dict)
    return [InProcessComm(size, rank, calls) for rank in range(size)]


def run_in_lockstep(motions: Sequence[Motion]) -> None:
    """Run one collective generator per simulated rank to the end, in lockstep; RuntimeError if a rank misses a call."""
    while True:
        turns = [next(motion, None) for motion in motions]
        if all(requests is None for requests in turns):
            return
        done = [requests is not None and all(request.Test() for request in requests) for requests in turns]
        if late := [rank for rank, complete in enumerate(done) if not complete]:
            raise RuntimeError(f"ranks {late} wait for messages that nobody has sent")
