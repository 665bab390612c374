"""Messages over MPI point-to-point: any network that the MPI underneath knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from collectives.transport.wire import Apart, Piece, Wait

_Specification = list[Any]

FEW = 3
"""Up to so many requests are faster started and awaited one by one, without a list to pass on."""


class _Messages:
    """Pieces of memory as MPI buffers; several pieces are one datatype of absolute addresses, never a copy."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._datatypes: list[MPI.Datatype] = []

    def specify(self, pieces: Sequence[Piece]) -> _Specification:
        if len(pieces) == 1:
            address, nbytes = pieces[0]
            return [MPI.buffer.fromaddress(address, nbytes), nbytes, MPI.BYTE]
        if not pieces:
            return [None, 0, MPI.BYTE]
        lengths, addresses = [piece.nbytes for piece in pieces], [piece.address for piece in pieces]
        datatype = MPI.BYTE.Create_hindexed(lengths, addresses).Commit()
        self._datatypes.append(datatype)
        return [MPI.BOTTOM, 1, datatype]

    def free(self) -> None:
        for datatype in self._datatypes:
            datatype.Free()
        self._datatypes.clear()


class Persistent(Apart):
    """Every message a persistent request, bound once: what blocking and persistent collectives run on."""

    def __init__(self, comm: MPI.Intracomm, tag: int) -> None:
        self._messages = _Messages(comm)
        self._tag = tag
        self._requests: list[MPI.Prequest] = []

    def send(self, peer: int, pieces: Sequence[Piece], stays: bool = True) -> MPI.Prequest:
        return self._bound(self._messages.comm.Send_init(self._messages.specify(pieces), peer, self._tag))

    def receive(self, peer: int, pieces: Sequence[Piece]) -> MPI.Prequest:
        return self._bound(self._messages.comm.Recv_init(self._messages.specify(pieces), peer, self._tag))

    def _bound(self, request: MPI.Prequest) -> MPI.Prequest:
        self._requests.append(request)
        return request

    def starting(self, messages: Sequence[MPI.Prequest]) -> Sequence[Callable[[], object]]:
        if len(messages) <= FEW:
            return [message.Start for message in messages]
        return [partial(MPI.Prequest.Startall, list(messages))]

    def waiting(self, messages: Sequence[MPI.Prequest]) -> Sequence[Wait]:
        if len(messages) <= FEW:
            return [Wait(message.Wait, message.Test) for message in messages]
        several = list(messages)
        return [Wait(partial(MPI.Request.Waitall, several), partial(MPI.Request.Testall, several))]

    def free(self) -> None:
        for request in self._requests:
            request.Free()
        self._requests.clear()
        self._messages.free()


class _Posted:
    """A message that is posted anew at every start, with the tag of the call."""

    __slots__ = ("post", "request")

    def __init__(self, post: Callable[[int], MPI.Request]) -> None:
        self.post = post
        self.request = MPI.REQUEST_NULL


class Immediate(Apart):
    """Every message posted when its round begins, under the tag of the call: what non-blocking collectives run on.

    `tag` is set before each start, so that any number of calls may be in flight.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._messages = _Messages(comm)
        self.tag = 0

    def send(self, peer: int, pieces: Sequence[Piece], stays: bool = True) -> _Posted:
        return _Posted(partial(self._messages.comm.Isend, self._messages.specify(pieces), peer))

    def receive(self, peer: int, pieces: Sequence[Piece]) -> _Posted:
        return _Posted(partial(self._messages.comm.Irecv, self._messages.specify(pieces), peer))

    def starting(self, messages: Sequence[_Posted]) -> Sequence[Callable[[], object]]:
        def start() -> None:
            for message in messages:
                message.request = message.post(self.tag)

        return [start]

    def waiting(self, messages: Sequence[_Posted]) -> Sequence[Wait]:
        def wait() -> None:
            MPI.Request.Waitall([message.request for message in messages])

        def test() -> bool:
            return MPI.Request.Testall([message.request for message in messages])

        return [Wait(wait, test)]

    def free(self) -> None:
        self._messages.free()
