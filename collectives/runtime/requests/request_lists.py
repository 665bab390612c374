"""Functions on lists of requests, of Chorus and of mpi4py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from mpi4py import MPI

from collectives.errors import InvalidArgument
from collectives.runtime.execution.operation import Operation
from collectives.runtime.execution.progress import ActiveRequests, progress
from collectives.transport.waits import Pauses, limited

if TYPE_CHECKING:
    from collectives.runtime.requests.request import Request


def wait_all(
    requests: Iterable[Request | MPI.Request], statuses: list[MPI.Status] | None = None, timeout: float | None = None
) -> Literal[True]:
    """Wait until all requests, of Chorus or mpi4py, are complete. Return True. Raises if one was freed or aborted.

    After `timeout` seconds it raises `collectives.errors.Timeout`, and leaves the requests as they are. Default: the
    least time limit of their communicators.
    """
    pending = _Several(requests)
    with pending.limit(timeout):
        pauses: Pauses | None = None
        while not test_all(pending.requests, statuses):
            pauses = pauses or Pauses(ActiveRequests(pending))
            pauses.pause()
    return True


class _Several:
    """Requests that are waited for."""

    moves = 0

    def __init__(self, requests: Iterable[Request | MPI.Request]) -> None:
        self.requests = list(requests)

    @property
    def _active(self) -> list[Any]:
        """Those of Chorus that are under way."""
        return [one for one in self.requests if isinstance(one, Operation) and one.active]

    def limit(self, timeout: float | None) -> AbstractContextManager[object]:
        """Time limit of a wait for all."""
        active = self._active
        if timeout is None:
            timeout = min((one.timeout for one in active if one.timeout is not None), default=None)
        return limited(timeout, active[0].owner.rank if active else MPI.COMM_WORLD.Get_rank())

    def stall(self, idle: float) -> None:
        """Look at the ranks that the first of the active requests waits for."""
        for one in self._active[:1]:
            one.stall(idle)

    def describe(self, subject: str) -> str:
        """Sentence on what the first of the active requests waits for."""
        active = self._active
        return active[0].describe(subject) if active else f"wait_all: {subject} for requests of mpi4py"


def test_all(requests: Sequence[Request | MPI.Request], statuses: list[MPI.Status] | None = None) -> bool:  # noqa: PT028
    """True if all requests are complete, which releases them. Otherwise makes progress and releases none."""
    progress()
    if not all([request.Get_status() for request in requests]):  # every one: tests also progress MPI's own
        return False
    if statuses is not None:
        statuses.extend(MPI.Status() for _ in range(len(requests) - len(statuses)))
    for index, request in enumerate(requests):
        request.Wait(None if statuses is None else statuses[index])
    return True


def start_all(requests: Iterable[Request | MPI.Prequest]) -> None:
    """Start all persistent requests, of Chorus or mpi4py.

    If one of Chorus is not idle, or one is there twice, raise InvalidArgument and start none.
    """
    several = list(requests)
    for request in several:
        if not (isinstance(request, MPI.Prequest) or request.is_startable):
            raise request.not_startable()
    if len({id(request) for request in several}) < len(several):
        raise InvalidArgument(MPI.ERR_REQUEST, "requests: expected each of them once, found one of them twice")
    for request in several:
        request.Start()
