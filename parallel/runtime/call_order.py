"""Order of the calls of all open engines. All ranks must begin them in the same order.

Each rank counts the calls that it has begun on each engine. A rank whose call takes long sends its counts to the other
ranks of this engine. One that waits in another engine, or in another method of the same, finds from them that the two
have begun calls in different orders. No later message changes that: the two would wait for each other for ever.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
from mpi4py import MPI

from collectives.runtime.execution.message_wait import MessageWait

COUNTS = 2
"""Tag of messages with counts."""

PATIENCE = 1.0
"""Seconds of a call after which its rank compares its counts with the counts of other ranks."""

MOST_CALLS = 64
"""Number of calls that a rank remembers, to compare them with calls of ranks that are behind."""

_open: list[CallOrder] = []

_numbers = count(1)


class Counts(NamedTuple):
    """Message of a rank whose call takes long."""

    call: str
    begun: dict[int, float]  # calls that it has begun, by the keys of engines


class CallOrder:
    """Calls of one engine that this rank has begun, ordered with the calls of other open engines.

    Construction and `end` are collective. `comm` is of the engine alone. None, of threads as ranks, compares nothing.
    Engines that a thread calls are compared with each other.
    """

    def __init__(self, comm: MPI.Intracomm | None):
        self._comm = comm
        key, number = (0, 0) if comm is None else comm.bcast((uuid4().int >> 66, next(_numbers)))
        self.key: int = key
        """Number of the engine, the same on all ranks, of no other engine."""

        self._number: int = number  # of the engine, as rank 0 counts them
        self.begun: float = 0
        """Number of calls. Inf after `ignore`."""

        self._calls = deque(["construction"], maxlen=MOST_CALLS)  # the last ones, up to the present one
        self._due, self._is_posted, self._thread = math.inf, False, threading.get_ident()
        self._latest: dict[int, Counts] = {}  # by rank
        self._sent: list[MPI.Request] = []
        self._posts = self._received = 0  # numbers of times that counts were sent to all, and of messages with counts
        if comm is not None:
            _open.append(self)

    @property
    def call(self) -> str:
        """Name of the present call."""
        return self._calls[-1]

    def begin(self, call: str) -> None:
        """Begin a call. Not collective."""
        self.begun += 1
        self._calls.append(call)
        self._due, self._is_posted, self._thread = time.monotonic() + PATIENCE, False, threading.get_ident()

    def ignore(self) -> None:
        """Stop comparing the calls of this engine: after a failure, ranks leave it in different calls."""
        self.begun = math.inf

    def difference(self, compares_calls: bool) -> str | None:
        """Text on a rank that has begun calls in another order, once the present call takes long. Not collective.

        A rank that has begun call n of one engine, and not call m of another, differs from one that has begun call m,
        and not call n. With `compares_calls` so does one whose call of the same number has another name.
        """
        if time.monotonic() < self._due or self._comm is None:
            return None
        # only calls of one thread have an order
        orders = [order for order in tuple(_open) if order._thread == self._thread]
        if not self._is_posted:
            self._is_posted, self._posts = True, self._posts + 1
            counts = tuple(Counts(self.call, {order.key: order.begun for order in orders}))
            self._sent = [one for one in self._sent if not one.Test()] + send_to_others(self._comm, counts, COUNTS)
        for order in orders:
            for rank, (call, begun) in order._received_counts().items():
                differs = begun[order.key] > order.begun and begun.get(self.key, self.begun) < self.begun
                ago = self.begun - begun[order.key]
                if compares_calls and order is self and 0 <= ago < len(self._calls):
                    differs = call != self._calls[-1 - int(ago)]
                if differs:
                    here = self._comm.Get_rank(), f"in {self.call} of engine {self._number}"
                    (first, there), other = sorted([here, (rank, f"in {call} of engine {order._number}")])
                    where = f"rank {first} is {there}, rank {' '.join(map(str, other))}"
                    return f"{where}; expected calls in one order on all ranks"
        return None

    def _received_counts(self) -> dict[int, Counts]:
        for rank, counts in messages(self._comm, COUNTS):
            self._latest[rank] = Counts(*counts)
            self._received += 1
        return self._latest

    def _wait_for_all(self, done: Callable[[], object]) -> None:
        assert self._comm is not None
        MessageWait("close", self._comm, dict).until(done)

    def leave(self) -> None:
        """End the comparison on this rank. Not collective."""
        if self in _open:
            _open.remove(self)

    def end(self) -> None:
        """Receive all messages: the next communicator might receive one that is in flight. Collective."""
        self.leave()
        if self._comm is not None:
            mine, posts = np.array([self._posts]), np.zeros(1, np.int64)
            self._wait_for_all(self._comm.Iallreduce(mine, posts).Test)
            self._wait_for_all(lambda: self._received_counts() is None or self._received == posts[0] - self._posts)
            self._wait_for_all(lambda: all([request.Test() for request in self._sent]))


def messages(comm: MPI.Intracomm | None, tag: int) -> Iterator[tuple[int, Any]]:
    """Receive the messages that have arrived. Yields (rank, message). Not collective."""
    status = MPI.Status()
    while comm is not None and comm.Iprobe(MPI.ANY_SOURCE, tag, status):
        yield status.source, comm.recv(None, status.source, tag)


def send_to_others(comm: MPI.Intracomm, message: Any, tag: int) -> list[MPI.Request]:
    """Start sending a short message to all other ranks. Not collective."""
    return [comm.isend(message, rank, tag) for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
