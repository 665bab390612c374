"""Functions on lists of requests, of Chorus and of mpi4py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from mpi4py import MPI

from collectives.errors import InvalidArgument
from collectives.runtime.progress import progress
from collectives.transport.wire import pause

if TYPE_CHECKING:
    from collectives.runtime.requests import Request


def wait_all(requests: Iterable[Request | MPI.Request], statuses: list[MPI.Status] | None = None) -> Literal[True]:
    """Wait until all requests, of Chorus or mpi4py, are complete; return True. Raises if one was freed or aborted."""
    pending, turn = list(requests), 0
    while not test_all(pending, statuses):
        pause(turn := turn + 1)
    return True


def test_all(requests: Sequence[Request | MPI.Request], statuses: list[MPI.Status] | None = None) -> bool:  # noqa: PT028
    """True if all requests are complete, which releases them; otherwise makes progress and releases none."""
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
