# mypy: disable-error-code="override"
"""mpi4py's blocking point-to-point methods, with progress of non-blocking collectives.

MPI promises progress of all operations while a rank waits in one call. Chorus's collectives would not progress while
mpi4py's ``Recv`` blocks, and two ranks could deadlock. So each method starts its non-blocking form and makes progress
until that is complete; without active requests it is mpi4py's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Self

from mpi4py import MPI

from collectives.runtime.progress import active_requests, progress_until

_SENDS = {"Send": "Isend", "Ssend": "Issend", "Rsend": "Irsend", "send": "isend", "ssend": "issend"}
_PROBES = {"Probe": "Iprobe", "Mprobe": "Improbe", "probe": "iprobe", "mprobe": "improbe"}


class PointToPoint(MPI.Intracomm):
    """An Intracomm whose blocking sends, receives and probes progress collectives. Arguments are mpi4py's."""

    def __new__(cls, comm: MPI.Intracomm | None = None, **_: Any) -> Self:
        """Pass on no keywords of `Communicator`."""
        return super().__new__(cls, comm)

    def Recv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> None:
        """As in mpi4py."""
        if not active_requests:
            return super().Recv(buf, source, tag, status)
        return _wait(self.Irecv(buf, source, tag), status)

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
        """As in mpi4py."""
        if not active_requests:
            return super().Sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag, status)
        receive, send = self.Irecv(recvbuf, source, recvtag), self.Isend(sendbuf, dest, sendtag)
        _wait(receive, status)
        return _wait(send)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """As in mpi4py."""
        if not active_requests:
            return super().Sendrecv_replace(buf, dest, sendtag, source, recvtag, status)
        return _wait(self.Isendrecv_replace(buf, dest, sendtag, source, recvtag), status)

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """As in mpi4py."""
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
        """As in mpi4py."""
        if not active_requests:
            return super().sendrecv(sendobj, dest, sendtag, recvbuf, source, recvtag, status)
        request = self.isend(sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        _wait(request)
        return received


def _wait(request: MPI.Request, status: MPI.Status | None = None) -> None:
    progress_until(lambda: request.Test(status))


def _poll(probe: Callable[[], Any]) -> Any:
    """Make progress until a probe finds a message."""
    found: Any = None

    def arrived() -> bool:
        nonlocal found
        found = probe()
        return bool(found)

    progress_until(arrived)
    return found


def _with_progress(name: str, nonblocking: str, complete: Callable[[Callable[[], Any]], Any]) -> Callable[..., Any]:
    method = getattr(MPI.Intracomm, name)

    @wraps(method)
    def wrapper(self: PointToPoint, *arguments: Any, **keywords: Any) -> Any:
        if not active_requests:
            return method(self, *arguments, **keywords)
        return complete(partial(getattr(self, nonblocking), *arguments, **keywords))

    return wrapper


for _names, _complete in ((_SENDS, lambda start: _wait(start())), (_PROBES, _poll)):
    for _name, _nonblocking in _names.items():
        setattr(PointToPoint, _name, _with_progress(_name, _nonblocking, _complete))
