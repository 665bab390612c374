"""Transport over MPI point-to-point messages: each start is an Isend or Irecv with the tag of the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int64
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.engine.assembly import Instruction, MemoryOperand, Place, calling
from collectives.engine.extension import available, use_mpi
from collectives.engine.instructions import ABSOLUTE, FAILED_IN_MPI, Kind
from collectives.errors import mismatch
from collectives.transport.wire import BoundMessage, Piece, Wire


class MpiMessage:
    """BoundMessage over MPI with a tag: a send to `peer`, or a receive from it."""

    def __init__(self, comm: MPI.Intracomm, tag: int, peer: int, receives: bool) -> None:
        self._comm, self._tag, self.peer, self.receives = comm, tag, peer, receives

    def describe(self, record: Any) -> None:
        """Fill the record of the message for the engine."""
        if available():
            use_mpi()
        record["comm"], record["datatype"] = (c_int64(handle).value for handle in (self._comm.handle, MPI.BYTE.handle))
        record["peer"], record["tag"], record["receives"] = self.peer, self._tag, self.receives

    def error(self, result: int, record: Any, nbytes: int) -> Exception:
        """The error by which a message of `nbytes` has failed, by a result of the engine."""
        if result == FAILED_IN_MPI:
            return MPI.Exception(int(record["error"]))
        return mismatch(self._comm.Get_rank(), self.peer, nbytes, int(record["count"]))


class MpiTransport(Wire):
    """Transport over MPI messages with a tag.

    `cut` gives the bytes per part of messages that a device may send or receive. Messages of several pieces are
    packed, or with `typed` described by an MPI datatype: for device memory, not accessed by this process.
    """

    def __init__(
        self, comm: MPI.Intracomm, tag: int, cut: Callable[[int], int] | None = None, typed: bool = False
    ) -> None:
        self._comm, self._tag, self._cut, self._typed = comm, tag, cut, typed
        self._packed: list[np.ndarray] = []
        self._described: list[_TypedMessage] = []

    def send(self, peer: int, pieces: Sequence[Piece], stable: bool = True) -> BoundMessage:
        return self._message(peer, pieces, receives=False)

    def receive(self, peer: int, pieces: Sequence[Piece]) -> BoundMessage:
        return self._message(peer, pieces, receives=True)

    def _message(self, peer: int, pieces: Sequence[Piece], receives: bool) -> BoundMessage:
        nbytes = sum(piece.nbytes for piece in pieces)
        if self._typed and len(pieces) > 1:
            typed = _TypedMessage(self._comm, self._tag, peer, pieces, receives)
            self._described.append(typed)
            return BoundMessage([calling(typed.start)], [calling(typed.test)])
        places = [piece.place for piece in pieces]
        # MPI takes one buffer: pieces are packed before a send and unpacked after a receive
        if len(pieces) > 1:
            places = self._pack(pieces)
        first = places[0] if places else Place(ABSOLUTE, 0)
        message = MpiMessage(self._comm, self._tag, peer, receives)
        kind = Kind.NET_RECV if receives else Kind.NET_SEND
        operand = MemoryOperand(nbytes, out=first) if receives else MemoryOperand(nbytes, first)
        starts, ends = [Instruction(kind, [operand], message=message)], []
        ends.append(Instruction(Kind.NET_WAIT, [operand], message=message))
        if len(pieces) > 1:
            ways = zip(pieces, places, strict=True)
            if receives:
                ends.append(Instruction(Kind.LOCAL, [MemoryOperand(one.nbytes, at, out=one.place) for one, at in ways]))
            else:
                starts.insert(
                    0, Instruction(Kind.LOCAL, [MemoryOperand(one.nbytes, one.place, out=at) for one, at in ways])
                )
        return BoundMessage(starts, ends)

    def _pack(self, pieces: Sequence[Piece]) -> list[Place]:
        """Places, one after the other: in a program of one length, in memory of the transport's own."""
        if self.packing is not None:
            return self.packing(pieces)
        packed = np.empty(sum(piece.nbytes for piece in pieces), np.uint8)
        self._packed.append(packed)
        at, places = MPI.Get_address(packed), []
        for piece in pieces:
            places.append(Place(ABSOLUTE, at))
            at += piece.nbytes
        return places

    def segment_size(self, nbytes: int, usual: int) -> int:
        return usual if self._cut is None else self._cut(nbytes)

    def use_tag(self, tag: int) -> None:
        for message in self._described:
            message.tag = tag

    def free(self) -> None:
        for message in self._described:
            message.datatype.Free()
        self._described.clear()


class _TypedMessage:
    """BoundMessage of several pieces at fixed addresses, described by an MPI datatype."""

    def __init__(self, comm: MPI.Intracomm, tag: int, peer: int, pieces: Sequence[Piece], receives: bool) -> None:
        self.tag = tag
        lengths, addresses = [piece.nbytes for piece in pieces], [piece.address for piece in pieces]
        self.datatype = MPI.BYTE.Create_hindexed(lengths, addresses).Commit()
        self._length = LengthCheck(comm, peer, sum(lengths)) if receives else None
        self._post = partial(comm.Irecv if receives else comm.Isend, [MPI.BOTTOM, 1, self.datatype], peer)
        self._request = MPI.REQUEST_NULL

    def start(self) -> None:
        self._request = self._post(self.tag)

    def test(self) -> bool:
        if self._length is None:
            return self._request.Test()
        if not self._request.Test(self._length.status):
            return False
        self._length.check()
        return True


class LengthCheck:
    """Check of the length of a received message. MPI itself raises for longer messages only."""

    __slots__ = ("_comm", "_nbytes", "_peer", "status")

    def __init__(self, comm: MPI.Intracomm, peer: int, nbytes: int) -> None:
        self._comm, self._peer, self._nbytes = comm, peer, nbytes
        self.status = MPI.Status()

    def check(self) -> None:
        """Raise `Mismatch` if the received message, described by the status, has another length."""
        found = self.status.Get_count(MPI.BYTE)
        # The status of a request that is not active has no source.
        if found != self._nbytes and self.status.Get_source() != MPI.ANY_SOURCE:
            raise mismatch(self._comm.Get_rank(), self._peer, self._nbytes, found)
