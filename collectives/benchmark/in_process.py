"""Encoded collectives of many ranks, played in one process: the same code, with messages that are copies.

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
    """A collective that has been begun when every rank has started its own; then it is over at once."""

    def __init__(self, start: Callable[[InProcessRequest], None]):
        self._start = start
        self.over = False

    def Start(self) -> None:
        """Begin."""
        self.over = False
        self._start(self)

    def Test(self) -> bool:
        """True if the operation is complete."""
        return self.over

    def Free(self) -> None:
        """Nothing is held."""


class _InProcessHub:
    """Matching of the ranks' calls, in the order of each rank."""

    def __init__(self, size: int):
        self.size = size
        self.calls: dict[int, dict[int, tuple[InProcessRequest, Any]]] = {}

    def enter(self, number: int, rank: int, request: InProcessRequest, message: Any, move: Move) -> None:
        """The call of a rank; the last rank's moves the messages of all."""
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
    return wire[places[rank] : places[rank] + sizes[rank]]


class InProcessComm:
    """Communicator between threads, with the methods that encoded collectives use."""

    nodes = None

    def __init__(self, room: _InProcessHub, rank: int):
        self._room, self._rank, self._numbers = room, rank, count()

    def Get_rank(self) -> int:
        """Rank."""
        return self._rank

    def Get_size(self) -> int:
        """Number of ranks."""
        return self._room.size

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        """Memory that nobody shares."""
        return np.empty(shape, dtype)

    def Alltoallv_init(self, sent: Any, received: Any) -> InProcessRequest:
        """Bound."""
        return self._request((sent, received), _all_to_all)

    def _request(self, message: Any, move: Move) -> InProcessRequest:
        return InProcessRequest(
            lambda request: self._room.enter(next(self._numbers), self._rank, request, message, move)
        )

    def Iallreduce(self, sent: Any, received: np.ndarray, op: MPI.Op) -> InProcessRequest:
        """Begun, in place."""
        (request := self._request(received, partial(_in_place, op))).Start()
        return request

    def Ialltoallv(self, sent: Any, received: Any) -> InProcessRequest:
        """Begun."""
        (request := self.Alltoallv_init(sent, received)).Start()
        return request

    def Allgatherv_init(self, sent: Any, received: Any) -> InProcessRequest:
        """Bound, in place."""
        wire, sizes, places, kind = received
        size = self.Get_size()
        mine = [wire, [sizes[self._rank]] * size, [places[self._rank]] * size, kind]
        return self.Alltoallv_init(mine, received)


def played(size: int) -> list[Any]:
    """The communicators of so many ranks."""
    room = _InProcessHub(size)
    return [InProcessComm(room, rank) for rank in range(size)]


def play(motions: Sequence[Motion]) -> None:
    """All ranks' motions to their ends, in turns.

    Raises
    ------
    RuntimeError
        If a rank waits for what others have not begun: motions of ranks have as many turns, and start the same calls.
    """
    going = list(motions)
    while going:
        turns = [next(motion, None) for motion in going]
        if all(requests is None for requests in turns):
            return
        late = [
            rank
            for rank, requests in enumerate(turns)
            if requests is None or not all(request.Test() for request in requests)
        ]
        if late:
            raise RuntimeError(f"ranks {late} wait for messages that nobody has sent")
