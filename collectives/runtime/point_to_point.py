# mypy: disable-error-code="override"
"""mpi4py's blocking point-to-point, during which non-blocking collectives go on.

MPI promises that whoever waits in one call helps all others along. Ours would stand still while a rank waits in
``Recv``, and two ranks could wait for each other for ever. So, while any operation is under way, each of these methods
posts its non-blocking twin and makes progress until that is over; otherwise it is mpi4py's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from collectives.runtime.requests import active_requests, progress_until


def _finish(*requests: MPI.Request, status: MPI.Status | None = None) -> None:
    """Make progress until all are over; the last one fills the status."""
    *others, last = requests
    progress_until(lambda: last.Test(status))
    for request in others:
        progress_until(request.Test)


def _matched(probe: Callable[[], MPI.Message | None]) -> MPI.Message:
    """Make progress until a message is there, and take it out of the queue."""
    found: list[MPI.Message] = []

    def there() -> bool:
        message = probe()
        found.extend([] if message is None else [message])
        return bool(found)

    progress_until(there)
    return found[0]


class PointToPoint(MPI.Intracomm):
    """An Intracomm whose blocking sends, receives and probes keep collectives moving. Arguments are mpi4py's."""

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """As mpi4py's."""
        if not active_requests:
            return super().Send(buf, dest, tag)
        return _finish(self.Isend(buf, dest, tag))

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """As mpi4py's."""
        if not active_requests:
            return super().Ssend(buf, dest, tag)
        return _finish(self.Issend(buf, dest, tag))

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """As mpi4py's."""
        if not active_requests:
            return super().Rsend(buf, dest, tag)
        return _finish(self.Irsend(buf, dest, tag))

    def Recv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> None:
        """As mpi4py's."""
        if not active_requests:
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
        if not active_requests:
            return super().Sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag, status)
        receive = self.Irecv(recvbuf, source, recvtag)
        return _finish(self.Isend(sendbuf, dest, sendtag), receive, status=status)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """As mpi4py's."""
        if not active_requests:
            return super().Sendrecv_replace(buf, dest, sendtag, source, recvtag, status)
        return _finish(self.Isendrecv_replace(buf, dest, sendtag, source, recvtag), status=status)

    def Mprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message:
        """As mpi4py's."""
        if not active_requests:
            return super().Mprobe(source, tag, status)
        return _matched(lambda: self.Improbe(source, tag, status))

    def Probe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None) -> Any:
        """As mpi4py's."""
        if not active_requests:
            return super().Probe(source, tag, status)
        progress_until(lambda: self.Iprobe(source, tag, status))
        return True

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """As mpi4py's."""
        if not active_requests:
            return super().send(obj, dest, tag)
        request = self.isend(obj, dest, tag)
        return progress_until(lambda: request.test()[0])

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """As mpi4py's."""
        if not active_requests:
            return super().ssend(obj, dest, tag)
        request = self.issend(obj, dest, tag)
        return progress_until(lambda: request.test()[0])

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """As mpi4py's."""
        if active_requests:
            progress_until(lambda: self.iprobe(source, tag))
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
        if not active_requests:
            return super().sendrecv(sendobj, dest, sendtag, recvbuf, source, recvtag, status)
        request = self.isend(sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        progress_until(lambda: request.test()[0])
        return received

    def probe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None) -> Any:
        """As mpi4py's."""
        if not active_requests:
            return super().probe(source, tag, status)
        progress_until(lambda: self.iprobe(source, tag, status))
        return True

    def mprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message:
        """As mpi4py's."""
        if not active_requests:
            return super().mprobe(source, tag, status)
        return _matched(lambda: self.improbe(source, tag, status))
