"""Message bus between servers and workers: non-blocking sends and receives of headers and vectors.

A message is a header of fixed length and the vectors that it announces. Receives for headers are always posted. The
receiver provides the buffers of the vectors. `send` and `poll` never block.

Under an MPI that survives failures the death of a peer arrives as a LOST message, the last one from that peer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.runtime.execution.message_wait import MessageWait
from collectives.runtime.execution.progress import YIELDS_OF_POLL
from collectives.transport.waits import Pauses
from parallel.asynchronous.server.messages import (
    Awaits,
    Envelope,
    Mail,
    MessageFormat,
    MessageHandle,
    MessageKind,
    ServerMessage,
)

HEADER, VECTOR = 0, 1  # tags
WATCHED = 16  # pauses from one call of `watch` to the next

DEATHS = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
"""Error classes that indicate the death of a peer."""


def succeeds(call: Callable[[], bool | None]) -> bool | None:
    """Success of an MPI call: False if it returns False, None if it fails because the peer is dead, else True."""
    try:
        return call() is not False
    except MPI.Exception as error:
        if error.Get_error_class() not in DEATHS:
            raise
        return None


def finished(requests: Sequence[MPI.Request]) -> bool:
    """True if all requests are complete. Tests each one: the error class of `Testall` does not identify a dead peer."""
    return all([request.Test() for request in requests])


class SentMessage(MessageHandle):
    """Handle of a message that is being sent. Its vectors must not change until `done` returns True."""

    def __init__(self, bus: MessageBus, peer: int, requests: list[MPI.Request], kept: Any):
        self._bus, self.peer, self._requests, self._kept = bus, peer, requests, kept

    def done(self) -> bool:
        """True if all sends of the message have completed, or its receiver is dead."""
        return self.peer in self._bus.lost or succeeds(lambda: finished(self._requests)) is not False


class MessageBus(Mail):
    """Non-blocking messages between a rank and its peers, on a duplicate of `comm`. Construction is collective.

    Waits for messages end by Timeout, PeerLeft or PeerFailed, unless ranks `survive` others. ``watch()`` is called in
    them now and then, and raises an exception to end them.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        peers: Sequence[int],
        workers: int,
        watch: Callable[[], None] = lambda: None,
        survive: bool = False,
    ):
        self._watch = watch
        self._awaits: Awaits = dict
        self._wait = MessageWait("message", comm, lambda: self._awaits(), survive)
        self._pauses: Pauses | None = None  # of the present wait
        self._turns = 0
        self._comm = MPI.Intracomm(comm).Dup()
        self._wire = MessageFormat(workers)
        self._peers = list(peers)
        self._headers = [bytearray(self._wire.nbytes) for _ in self._peers]
        self._requests = [
            self._comm.Recv_init([header, MPI.BYTE], peer, HEADER) for peer, header in zip(self._peers, self._headers)
        ]
        self._arriving: dict[int, tuple[ServerMessage, tuple[Any, ...], list[MPI.Request]]] = {}
        self._arrived: deque[Envelope] = deque()
        self._sending: list[SentMessage] = []
        self._posted = list(range(len(self._peers)))
        self._is_open = True
        self.lost: set[int] = set()  # dead peers
        self.traffic: Counter[tuple[str, MessageKind, int]] = Counter()  # bytes of vectors: direction, kind, peer
        MPI.Prequest.Startall(self._requests)

    def send(self, peer: int, message: ServerMessage, *vectors: Any) -> SentMessage:
        """Start sending a header and contiguous vectors of the lengths given in it. No-op if `peer` is dead."""
        header, vectors = self._wire.pack(message), tuple(vector for vector in vectors if len(vector))
        parts = [(header, HEADER), *((vector.view(np.uint8), VECTOR) for vector in vectors)]
        requests: list[MPI.Request] = []
        sent = SentMessage(self, peer, requests, (header, vectors))
        if peer in self.lost:
            return sent
        succeeds(lambda: requests.extend(self._comm.Isend([data, MPI.BYTE], peer, tag) for data, tag in parts))
        self.traffic["sent", message.kind, peer] += sum(vector.nbytes for vector in vectors)
        self._sending = [other for other in self._sending if not other.done()]
        self._sending.append(sent)
        return sent

    def poll(self) -> Envelope | None:
        """Next completely received message, or None. Messages of one sender arrive in order."""
        if not self._arrived:
            self._progress()
        if self._arrived:
            self._end_wait()
            return self._arrived.popleft()
        return None

    def idle(self, awaits: Awaits) -> None:
        if self._pauses is None:
            with self._wait.limited():
                self._pauses = Pauses(self._wait)
        self._awaits, self._turns = awaits, self._turns + 1
        if self._turns % WATCHED == 0:
            self._watch()
            self._sending = [sent for sent in self._sending if not sent.done()]
        self._pauses.pause(0 if self._arriving or self._sending else YIELDS_OF_POLL)

    def _end_wait(self) -> None:
        if self._pauses is not None:
            self._pauses = None
            self._wait.end()

    def flush(self) -> None:
        """Wait until all sends have completed. The peers must poll meanwhile."""
        self._end_wait()
        while not all(sent.done() for sent in self._sending):
            self._progress()
            self.idle(lambda: {sent.peer: "to receive" for sent in self._sending if not sent.done()})
        self._sending = []
        self._end_wait()

    def close(self) -> None:
        """Free requests and communicator. Collective. No message may be in flight."""
        self.flush()
        self.withdraw()
        self._comm.Free()

    def withdraw(self) -> None:
        """Cancel this rank's receives. No-op after `close` or `leave`. Not collective: the communicator is not freed.

        MPI keeps the memory of messages that are being sent or received.
        """
        if not self._is_open:
            return
        self._is_open = False
        for at in self._posted:
            self._requests[at].Cancel()
            self._requests[at].Wait()
        for request in self._requests:
            request.Free()
        UNFINISHED.extend([*self._arriving.values(), *(sent for sent in self._sending if not sent.done())])

    def leave(self) -> None:
        """Complete this rank's sends and free nothing, instead of `close`. Not collective, as peers may be dead."""
        self.flush()
        self._is_open = False
        UNFINISHED.append(self)

    def _progress(self) -> None:
        for at, (message, vectors, requests) in list(self._arriving.items()):
            completed = succeeds(partial(finished, requests))
            if completed is None:
                self._lose(at)
            elif completed:
                del self._arriving[at]
                self._complete(at, message, vectors)
        for at in list(self._posted):
            completed = succeeds(self._requests[at].Test)
            if completed is None:
                self._lose(at)
            elif completed:
                self._posted.remove(at)
                self._post_receives(at)

    def _post_receives(self, at: int) -> None:
        message, peer = self._wire.unpack(self._headers[at]), self._peers[at]
        if not message.elements and message.rows <= 0:
            self._complete(at, message, ())
            return
        vectors, requests = tuple(self.accept(peer, message)), list[MPI.Request]()
        self._arriving[at] = message, vectors, requests
        posting = (self._comm.Irecv([vector.view(np.uint8), MPI.BYTE], peer, VECTOR) for vector in vectors)
        if not succeeds(lambda: requests.extend(posting)):
            self._lose(at)

    def _complete(self, at: int, message: ServerMessage, vectors: tuple[Any, ...]) -> None:
        peer = self._peers[at]
        self.traffic["received", message.kind, peer] += sum(vector.nbytes for vector in vectors)
        self._arrived.append(Envelope(peer, message, vectors))
        if succeeds(self._requests[at].Start):
            self._posted.append(at)
        else:
            self._lose(at)

    def _lose(self, at: int) -> None:
        UNFINISHED.append((self._arriving.pop(at, None), self._headers[at], self._sending))
        if at in self._posted:
            self._posted.remove(at)
        self.lost.add(self._peers[at])
        self._arrived.append(Envelope(self._peers[at], ServerMessage(MessageKind.LOST)))


UNFINISHED: list[Any] = []
"""Buffers of requests that never complete, kept alive because MPI may still access them."""
