"""All messages between servers and workers go through here: sent from where vectors lie, received to where they belong.

A message is a header of fixed length and the vectors that it announces. Receives for headers are always posted; whoever
gets one says where its vectors shall land. Nothing blocks, and nothing moves unless somebody polls.

Where the MPI goes on after the death of a rank, that is a letter too: LOST, the last from there.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from parallel.parameter_server.messages import Kind, Letter, Message, Wire

HEADER, VECTOR = 0, 1
"""Tags."""

BUSY_TURNS = 200
"""Looks in vain before a rank lets others have its core."""

NAP = 5e-5
"""Seconds that it then sleeps between two looks."""

DEATHS = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
"""Classes of errors by which an MPI tells that the other rank is dead."""


def succeeds(act: Callable[[], bool]) -> bool | None:
    """What a call of MPI says; None if the other rank is dead."""
    try:
        return act()
    except MPI.Exception as error:
        if error.Get_error_class() not in DEATHS:
            raise
        return None


def finished(requests: Sequence[MPI.Request]) -> bool:
    """As `Testall`, whose error would not tell a death from anything else."""
    return all([request.Test() for request in requests])


class Sent:
    """A message under way. Its vectors must not change until it is `done`."""

    __slots__ = ("_kept", "_peer", "_post", "_requests")

    def __init__(self, post: Post, peer: int, requests: list[MPI.Request], kept: Any):
        self._post, self._peer, self._requests, self._kept = post, peer, requests, kept

    def done(self) -> bool:
        """Whether it has left, or there is nobody whom it could reach."""
        if self._peer in self._post.lost:
            return True
        return succeeds(lambda: finished(self._requests)) is not False


class Post:
    """A rank's letters to and from some others.

    Parameters
    ----------
    comm : MPI.Intracomm
        Messages travel on a duplicate of it. Making and closing are collective.
    peers : sequence of int
        The ranks that it has to do with.
    workers : int

    Attributes
    ----------
    accept : callable (source, message) -> sequence of arrays
        Asked when a message comes that announces vectors: where they shall land.
    traffic : Counter
        Bytes of vectors by ``("sent" or "received", kind, peer)``.
    lost : set of int
        Peers that are dead.
    """

    def __init__(self, comm: MPI.Intracomm, peers: Sequence[int], workers: int):
        self._comm = MPI.Intracomm(comm).Dup()
        self._wire = Wire(workers)
        self._peers = list(peers)
        self._headers = [bytearray(self._wire.nbytes) for _ in self._peers]
        self._requests = [
            self._comm.Recv_init([header, MPI.BYTE], peer, HEADER) for peer, header in zip(self._peers, self._headers)
        ]
        self._arriving: dict[int, tuple[Message, tuple[Any, ...], list[MPI.Request]]] = {}
        self._arrived: deque[Letter] = deque()
        self._under_way: list[Sent] = []
        self._listening = list(range(len(self._peers)))
        self._in_vain = 0
        self.lost: set[int] = set()
        self.accept: Callable[[int, Message], Sequence[Any]] = lambda source, message: ()
        self.traffic: Counter[tuple[str, Kind, int]] = Counter()
        MPI.Prequest.Startall(self._requests)

    def send(self, peer: int, message: Message, *vectors: Any) -> Sent:
        """Start to send. Vectors are contiguous arrays, as many and as long as the message says."""
        header = self._wire.pack(message)
        parts = [(header, HEADER), *((vector.view(np.uint8), VECTOR) for vector in vectors)]
        requests: list[MPI.Request] = []
        sent = Sent(self, peer, requests, (header, vectors))
        if peer in self.lost:
            return sent

        def start() -> bool:
            requests.extend(self._comm.Isend([data, MPI.BYTE], peer, tag) for data, tag in parts)
            return True

        succeeds(start)
        for vector in vectors:
            self.traffic["sent", message.kind, peer] += vector.nbytes
        self._under_way = [other for other in self._under_way if not other.done()]
        self._under_way.append(sent)
        return sent

    def poll(self) -> Letter | None:
        """A letter that is complete, if there is one; letters of one sender come in the order in which they left."""
        if not self._arrived:
            self._move()
        if self._arrived:
            self._in_vain = 0
            return self._arrived.popleft()
        return None

    def idle(self) -> None:
        """Let other processes run, if there has been nothing to do for a while; what is on its way needs both ends."""
        self._in_vain += 1
        if self._in_vain > BUSY_TURNS:
            self._under_way = [sent for sent in self._under_way if not sent.done()]
            time.sleep(0 if self._arriving or self._under_way else NAP)

    def abandon(self, *kinds: Kind) -> None:
        """Nothing is kept here until it is answered: see `parallel.server.retry`."""

    def flush(self) -> None:
        """Wait until everything sent has left; the peers poll meanwhile."""
        while not all(sent.done() for sent in self._under_way):
            self._move()
            self.idle()
        self._under_way = []

    def close(self) -> None:
        """Give all back. Collective; nobody may have a letter under way."""
        self.flush()
        for at in self._listening:
            self._requests[at].Cancel()
            self._requests[at].Wait()
        for request in self._requests:
            request.Free()
        self._listening, self._requests = [], []
        self._comm.Free()

    def leave(self) -> None:
        """Send no more, and hear no more, without a word to the others: some may be dead."""
        self.flush()
        LEFT.append(self)

    def _move(self) -> None:
        """Look what has come."""
        for at, (message, vectors, requests) in list(self._arriving.items()):
            come = succeeds(partial(finished, requests))
            if come is None:
                self._lose(at)
            elif come:
                del self._arriving[at]
                self._complete(at, message, vectors)
        for at in list(self._listening):
            come = succeeds(self._requests[at].Test)
            if come is None:
                self._lose(at)
            elif come:
                self._listening.remove(at)
                self._open(at)

    def _open(self, at: int) -> None:
        """A header has come: make room for what follows."""
        message, peer = self._wire.unpack(self._headers[at]), self._peers[at]
        if not message.elements and message.rows <= 0:
            self._complete(at, message, ())
            return
        vectors, requests = tuple(self.accept(peer, message)), list[MPI.Request]()
        self._arriving[at] = message, vectors, requests

        def start() -> bool:
            requests.extend(self._comm.Irecv([vector.view(np.uint8), MPI.BYTE], peer, VECTOR) for vector in vectors)
            return True

        if succeeds(start) is None:
            self._lose(at)

    def _complete(self, at: int, message: Message, vectors: tuple[Any, ...]) -> None:
        peer = self._peers[at]
        for vector in vectors:
            self.traffic["received", message.kind, peer] += vector.nbytes
        self._arrived.append(Letter(peer, message, vectors))

        def listen() -> bool:
            self._requests[at].Start()
            return True

        if succeeds(listen):
            self._listening.append(at)
        else:
            self._lose(at)

    def _lose(self, at: int) -> None:
        """A peer is dead."""
        LEFT.append((self._arriving.pop(at, None), self._headers[at], self._under_way))
        if at in self._listening:
            self._listening.remove(at)
        self.lost.add(self._peers[at])
        self._arrived.append(Letter(self._peers[at], Message(Kind.LOST)))


LEFT: list[Any] = []
"""Memory that MPI may have in its hands until the end, since the other rank will never let go of it."""
