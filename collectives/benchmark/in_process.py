"""Encoded collectives of many ranks in one process: the code of the ranks, with messages that are copies.

ranks = [TwoShot(comm, count, codec) for comm in played(64)]
play([made.allreduce(x, out) for made, x, out in ...])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.compressed import Motion

Move = Callable[[dict[int, Any]], None]
"""Moves the messages of all ranks, by rank."""


class InProcessRequest:
    """A collective that completes as soon as every rank has started its request."""

    def __init__(self, start: Callable[[InProcessRequest], None]):
        self._start = start
        self.over = False

    def Start(self) -> None:
        self.over = False
        self._start(self)

    def Test(self) -> bool:
        return self.over

    def Free(self) -> None:
        """No-op."""


class _InProcessHub:
    """Matching of the ranks' calls, in the order of each rank."""

    def __init__(self, size: int):
        self.size = size
        self.calls: dict[int, dict[int, tuple[InProcessRequest, Any]]] = {}

    def enter(self, number: int, rank: int, request: InProcessRequest, message: Any, move: Move) -> None:
        """Register the call of a rank; that of the last rank moves the messages of all."""
        call = self.calls.setdefault(number, {})
        call[rank] = request, message
        if len(call) == self.size:
            move({each: message for each, (_, message) in call.items()})
            for one, _ in call.values():
                one.over = True
            del self.calls[number]


def _all_to_all(messages: dict[int, Any]) -> None:
    for target, (_, into) in messages.items():
        for source, (out, _) in messages.items():
            _part(into, source)[...] = _part(out, target)


def _in_place(op: MPI.Op, messages: dict[int, np.ndarray]) -> None:
    combine = next(each for kind, each in ((MPI.SUM, np.add), (MPI.MAX, np.maximum)) if kind == op)
    total = combine.reduce(list(messages.values()))
    for message in messages.values():
        message[...] = total


def _part(message: Any, rank: int) -> np.ndarray:
    wire, sizes, places, _ = message
    part: np.ndarray = wire[places[rank] : places[rank] + sizes[rank]]
    return part


class InProcessComm:
    """Communicator between threads, with the methods that encoded collectives use."""

    nodes = None

    def __init__(self, hub: _InProcessHub, rank: int):
        self._hub, self._rank, self._numbers = hub, rank, count()

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._hub.size

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def Alltoallv_init(self, sent: Any, received: Any) -> InProcessRequest:
        return self._request((sent, received), _all_to_all)

    def _request(self, message: Any, move: Move) -> InProcessRequest:
        return InProcessRequest(
            lambda request: self._hub.enter(next(self._numbers), self._rank, request, message, move)
        )

    def Iallreduce(self, sent: Any, received: np.ndarray, op: MPI.Op) -> InProcessRequest:
        (request := self._request(received, partial(_in_place, op))).Start()
        return request

    def Ialltoallv(self, sent: Any, received: Any) -> InProcessRequest:
        (request := self.Alltoallv_init(sent, received)).Start()
        return request

    def Allgatherv_init(self, sent: Any, received: Any) -> InProcessRequest:
        wire, sizes, places, kind = received
        size = self.Get_size()
        mine = [wire, [sizes[self._rank]] * size, [places[self._rank]] * size, kind]
        return self.Alltoallv_init(mine, received)


def played(size: int) -> list[Any]:
    """The communicators of so many ranks."""
    hub = _InProcessHub(size)
    return [InProcessComm(hub, rank) for rank in range(size)]


def play(motions: Sequence[Motion]) -> None:
    """Run all ranks' motions to their ends, in turns; all must have as many turns and start the same calls."""
    while True:
        turns = [next(motion, None) for motion in motions]
        if all(requests is None for requests in turns):
            return
        done = [requests is not None and all(request.Test() for request in requests) for requests in turns]
        if late := [rank for rank, complete in enumerate(done) if not complete]:
            raise RuntimeError(f"ranks {late} wait for messages that nobody has sent")
