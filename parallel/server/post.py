"""All messages between servers and workers go through here: sent from where vectors lie, received to where they belong.

A message is a header of fixed length and the vectors that it announces. Receives for headers are always posted; whoever
gets one says where its vectors shall land. Nothing blocks, and nothing moves unless somebody polls.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from parallel.server.messages import Kind, Letter, Message, Wire

HEADER, VECTOR = 0, 1
"""Tags."""

BUSY_TURNS = 200
"""Looks in vain before a rank lets others have its core."""

NAP = 5e-5
"""Seconds that it then sleeps between two looks."""


class Sent:
    """A message under way. Its vectors must not change until it is `done`."""

    __slots__ = ("_kept", "_requests")

    def __init__(self, requests: list[MPI.Request], kept: Any):
        self._requests, self._kept = requests, kept

    def done(self) -> bool:
        """Whether it has left."""
        return MPI.Request.Testall(self._requests)


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
        self._in_vain = 0
        self.accept: Callable[[int, Message], Sequence[Any]] = lambda source, message: ()
        self.traffic: Counter[tuple[str, Kind, int]] = Counter()
        MPI.Prequest.Startall(self._requests)

    def send(self, peer: int, message: Message, *vectors: Any) -> Sent:
        """Start to send. Vectors are contiguous arrays, as many and as long as the message says."""
        header = self._wire.pack(message)
        requests = [self._comm.Isend([header, MPI.BYTE], peer, HEADER)]
        for vector in vectors:
            requests.append(self._comm.Isend([vector.view(np.uint8), MPI.BYTE], peer, VECTOR))
            self.traffic["sent", message.kind, peer] += vector.nbytes
        sent = Sent(requests, (header, vectors))
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
        """Let other processes run, if there has been nothing to do for a while."""
        self._in_vain += 1
        if self._in_vain > BUSY_TURNS:
            time.sleep(NAP)

    def flush(self) -> None:
        """Wait until everything sent has left; the peers poll meanwhile."""
        while not all(sent.done() for sent in self._under_way):
            self._move()
            self.idle()
        self._under_way = []

    def close(self) -> None:
        """Give all back. Collective; nobody may have a letter under way."""
        self.flush()
        for request in self._requests:
            request.Cancel()
            request.Wait()
            request.Free()
        self._requests = []
        self._comm.Free()

    def _move(self) -> None:
        """Look what has come."""
        for at in [at for at, (_, _, requests) in self._arriving.items() if MPI.Request.Testall(requests)]:
            message, vectors, _ = self._arriving.pop(at)
            self._complete(at, message, vectors)
        for at in MPI.Request.Testsome(self._requests) or () if self._requests else ():
            message, peer = self._wire.unpack(self._headers[at]), self._peers[at]
            if not message.elements and message.rows <= 0:
                self._complete(at, message, ())
                continue
            vectors = tuple(self.accept(peer, message))
            requests = [self._comm.Irecv([vector.view(np.uint8), MPI.BYTE], peer, VECTOR) for vector in vectors]
            self._arriving[at] = message, vectors, requests

    def _complete(self, at: int, message: Message, vectors: tuple[Any, ...]) -> None:
        peer = self._peers[at]
        for vector in vectors:
            self.traffic["received", message.kind, peer] += vector.nbytes
        self._arrived.append(Letter(peer, message, vectors))
        self._requests[at].Start()
