"""Transports over MPI point-to-point messages."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpi4py import MPI

from collectives.errors import Mismatch, mismatch
from collectives.transport.wire import Iovec, Wire
from collectives.types import Wait

MOST_SINGLE_REQUESTS = 3
"""Number of requests up to which single Start and Wait calls are faster than Startall and Waitall."""


class _MpiTransport(Wire):
    """Base class of MPI transports: describes a message's byte ranges as one MPI buffer, without a copy.

    `cut` gives the bytes per part of messages that a device may send or receive.
    """

    def __init__(self, comm: MPI.Intracomm, cut: Callable[[int], int] | None) -> None:
        self._comm, self._cut = comm, cut
        self._datatypes: list[MPI.Datatype] = []

    def _buffer(self, pieces: Sequence[Iovec]) -> list[Any]:
        if len(pieces) == 1:
            address, nbytes = pieces[0]
            return [MPI.buffer.fromaddress(address, nbytes), nbytes, MPI.BYTE]
        if not pieces:
            return [None, 0, MPI.BYTE]
        lengths, addresses = [piece.nbytes for piece in pieces], [piece.address for piece in pieces]
        datatype = MPI.BYTE.Create_hindexed(lengths, addresses).Commit()
        self._datatypes.append(datatype)
        return [MPI.BOTTOM, 1, datatype]

    def segment_size(self, nbytes: int, usual: int) -> int:
        return usual if self._cut is None else self._cut(nbytes)

    def free(self) -> None:
        for datatype in self._datatypes:
            datatype.Free()
        self._datatypes.clear()


class LengthCheck:
    """Check of the length of a received message; MPI itself raises for longer messages only."""

    __slots__ = ("_comm", "_nbytes", "_peer", "status")

    def __init__(self, comm: MPI.Intracomm, peer: int, pieces: Sequence[Iovec]) -> None:
        self._comm, self._peer, self._nbytes = comm, peer, sum(piece.nbytes for piece in pieces)
        self.status = MPI.Status()

    def check(self) -> None:
        """Raise `Mismatch` if the received message, described by the status, has another length."""
        found = self.status.Get_count(MPI.BYTE)
        # The status of a request that is not active has no source.
        if found != self._nbytes and self.status.Get_source() != MPI.ANY_SOURCE:
            raise mismatch(self._comm.Get_rank(), self._peer, self._nbytes, found)

    def waiting(self, request: MPI.Prequest) -> Wait:
        """Wait and test functions of a receive request that also check the length on completion."""
        end, ended, status, check = request.Wait, request.Test, self.status, self.check

        def wait() -> None:
            end(status)
            check()

        def test() -> bool:
            if not ended(status):
                return False
            check()
            return True

        return Wait(wait, test, [request])


class PersistentMessage(NamedTuple):
    """Description of a persistent request: a send to `peer`, or a receive from it, whose length is then checked."""

    comm: MPI.Intracomm
    tag: int
    peer: int
    pieces: Sequence[Iovec]
    length: LengthCheck | None

    def refuse(self, found: int) -> Mismatch:
        """The error of a received message of `found` bytes."""
        expected = sum(piece.nbytes for piece in self.pieces)
        return mismatch(self.comm.Get_rank(), self.peer, expected, found)


def _waiting_all(requests: Callable[[], list[Any]], lengths: Sequence[LengthCheck | None]) -> Wait:
    """Wait and test functions that complete ``requests()``; `lengths` has the check of each receive, None for sends."""
    statuses = [MPI.Status() if length is None else length.status for length in lengths]
    checks = [length.check for length in lengths if length is not None]

    def wait() -> None:
        MPI.Request.Waitall(requests(), statuses)
        for check in checks:
            check()

    def test() -> bool:
        if not MPI.Request.Testall(requests(), statuses):
            return False
        for check in checks:
            check()
        return True

    return Wait(wait, test)


class PersistentTransport(_MpiTransport):
    """Transport over persistent MPI requests, for blocking and persistent collectives."""

    def __init__(self, comm: MPI.Intracomm, tag: int, cut: Callable[[int], int] | None = None) -> None:
        super().__init__(comm, cut)
        self._tag = tag
        self._requests: list[MPI.Prequest] = []
        self._messages: dict[int, PersistentMessage] = {}  # by the id of the request, which `_requests` keeps alive

    def send(self, peer: int, pieces: Sequence[Iovec], stable: bool = True) -> MPI.Prequest:
        request = self.own(self._comm.Send_init(self._buffer(pieces), peer, self._tag))
        self._messages[id(request)] = PersistentMessage(self._comm, self._tag, peer, pieces, None)
        return request

    def receive(self, peer: int, pieces: Sequence[Iovec]) -> MPI.Prequest:
        request = self.own(self._comm.Recv_init(self._buffer(pieces), peer, self._tag))
        length = LengthCheck(self._comm, peer, pieces)
        self._messages[id(request)] = PersistentMessage(self._comm, self._tag, peer, pieces, length)
        return request

    def describe(self, message: MPI.Prequest) -> PersistentMessage:
        return self._messages[id(message)]

    def own(self, request: MPI.Prequest) -> MPI.Prequest:
        """Free a request with the transport; returns it."""
        self._requests.append(request)
        return request

    def _wait(self, message: MPI.Prequest) -> Wait:
        length = self.describe(message).length
        return Wait(message.Wait, message.Test, [message]) if length is None else length.waiting(message)

    def start_calls(self, messages: Sequence[MPI.Prequest]) -> Sequence[Callable[[], object]]:
        if len(messages) <= MOST_SINGLE_REQUESTS:
            return [partial(MPI.Prequest.Start, message) for message in messages]
        return [partial(MPI.Prequest.Startall, list(messages))]

    def wait_calls(self, messages: Sequence[MPI.Prequest]) -> Sequence[Wait]:
        if len(messages) <= MOST_SINGLE_REQUESTS:
            return [self._wait(message) for message in messages]
        requests = list(messages)
        lengths = [self.describe(message).length for message in requests]
        return [_waiting_all(lambda: requests, lengths)._replace(awaited=requests)]

    def free(self) -> None:
        for request in self._requests:
            request.Free()
        self._requests.clear()
        self._messages.clear()
        super().free()


class _PostedMessage:
    """Send or receive that is posted anew (Isend, Irecv) at every start, with the tag of the call."""

    __slots__ = ("length", "post", "request")

    def __init__(self, post: Callable[[int], MPI.Request], length: LengthCheck | None = None) -> None:
        self.post, self.length = post, length
        self.request = MPI.REQUEST_NULL

    def wait(self) -> None:
        if self.length is None:
            self.request.Wait()
        else:
            self.request.Wait(self.length.status)
            self.length.check()

    def test(self) -> bool:
        """True if the message has ended; takes less time than a test of a list of one."""
        if self.length is None:
            return self.request.Test()
        if not self.request.Test(self.length.status):
            return False
        self.length.check()
        return True


class ImmediateTransport(_MpiTransport):
    """Transport over Isend and Irecv with the tag of the call, for non-blocking collectives.

    Each start has a tag of its own, so that several calls may be in progress.
    """

    def __init__(self, comm: MPI.Intracomm, cut: Callable[[int], int] | None = None) -> None:
        super().__init__(comm, cut)
        self._tag = 0

    def use_tag(self, tag: int) -> None:
        self._tag = tag

    def send(self, peer: int, pieces: Sequence[Iovec], stable: bool = True) -> _PostedMessage:
        return _PostedMessage(partial(self._comm.Isend, self._buffer(pieces), peer))

    def receive(self, peer: int, pieces: Sequence[Iovec]) -> _PostedMessage:
        post = partial(self._comm.Irecv, self._buffer(pieces), peer)
        return _PostedMessage(post, LengthCheck(self._comm, peer, pieces))

    def start_calls(self, messages: Sequence[_PostedMessage]) -> Sequence[Callable[[], object]]:
        def start() -> None:
            for message in messages:
                message.request = message.post(self._tag)

        return [start]

    def wait_calls(self, messages: Sequence[_PostedMessage]) -> Sequence[Wait]:
        if len(messages) == 1:
            return [Wait(messages[0].wait, messages[0].test)]
        posted = list(messages)
        return [_waiting_all(lambda: [message.request for message in posted], [each.length for each in posted])]
