# mypy: disable-error-code="override"
"""mpi4py's blocking point-to-point, during which non-blocking collectives go on.

MPI promises that whoever waits in one call helps all others along. Ours would stand still while a rank waits in
``Recv``, and two ranks could wait for each other for ever. So, while any operation is under way, each of these methods
posts its non-blocking twin and makes progress until that is over; otherwise it is mpi4py's own.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from collectives.runtime.requests import under_way, until


def _finish(*requests: MPI.Request, status: MPI.Status | None = None) -> None:
    """Make progress until all are over; the last one fills the status."""
    *others, last = requests
    until(lambda: last.Test(status))
    for request in others:
        until(request.Test)


class PointToPoint(MPI.Intracomm):
    """An Intracomm whose blocking sends, receives and probes keep collectives moving. Arguments are mpi4py's."""

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """As mpi4py's."""
        if not under_way:
            return super().Send(buf, dest, tag)
        return _finish(self.Isend(buf, dest, tag))

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """As mpi4py's."""
        if not under_way:
            return super().Ssend(buf, dest, tag)
        return _finish(self.Issend(buf, dest, tag))

    def Recv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> None:
        """As mpi4py's."""
        if not under_way:
            return super().Recv(buf, source, tag, status)
        return _finish(self.Irecv(buf, source, tag), status=status)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """As mpi4py's."""
        if not under_way:
            return super().Sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag, status)
        receive = self.Irecv(recvbuf, source, recvtag)
        return _finish(self.Isend(sendbuf, dest, sendtag), receive, status=status)

    def Probe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None) -> Any:
        """As mpi4py's."""
        if not under_way:
            return super().Probe(source, tag, status)
        until(lambda: self.Iprobe(source, tag, status))
        return True

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """As mpi4py's."""
        if not under_way:
            return super().send(obj, dest, tag)
        request = self.isend(obj, dest, tag)
        return until(lambda: request.test()[0])

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """As mpi4py's."""
        if not under_way:
            return super().ssend(obj, dest, tag)
        request = self.issend(obj, dest, tag)
        return until(lambda: request.test()[0])

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """As mpi4py's."""
        if under_way:
            until(lambda: self.iprobe(source, tag))
        return super().recv(buf, source, tag, status)

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """As mpi4py's."""
        if not under_way:
            return super().sendrecv(sendobj, dest, sendtag, recvbuf, source, recvtag, status)
        request = self.isend(sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        until(lambda: request.test()[0])
        return received

    def probe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None) -> Any:
        """As mpi4py's."""
        if not under_way:
            return super().probe(source, tag, status)
        until(lambda: self.iprobe(source, tag, status))
        return True
