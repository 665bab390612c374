"""Non-blocking collectives as MPI requests, so that mpi4py's functions on lists of requests accept them.

`MPI.Request.Waitall` and similar functions are C: they pass the handles of a list to the MPI. A `NativeRequest` has the
handle of a generalized request or of a receive, which is completed at the end of the collective, by the progress thread
if all others wait inside the MPI.

Making, completing and freeing such a handle takes longer than a short collective, so it is avoided where possible. A
compiled collective that is complete when its start returns uses the handle of a send to `MPI.PROC_NULL`, which is
complete. Handles of both kinds are kept for later requests if `Wait` of the request itself sees the end.
"""

# mypy: disable-error-code="misc"
# Methods of the two base classes differ in the return types of mpi4py's lower-case names.

from __future__ import annotations

from ctypes import memmove, string_at
from itertools import count
from typing import Any, ClassVar, Literal

from mpi4py import MPI

from collectives.engine.extension import engine
from collectives.runtime.execution.progress import mpi_is_thread_safe, progress_lock
from collectives.runtime.requests.request import Request, clear_status
from collectives.transport.waits import seconds_of


def new_request(*arguments: Any) -> Request:
    """Create the request of a non-blocking collective: a `NativeRequest` if MPI is thread-safe, else a `Request`."""
    if not mpi_is_thread_safe():
        return Request(*arguments)
    try:
        handle = _unused.pop()
    except IndexError:
        handle = PendingHandle()
    request = _new(NativeRequest, handle.request)  # not by the class, which takes as long again
    request.__init__(*arguments)
    request._handle = handle
    return request


def ended_request() -> Request:
    """Create the request of a non-blocking collective that has ended already.

    It has no attributes of its own, which would take as long as a call of the MPI.
    """
    request = _new(EndedRequest)
    return request if _take_handle(request) else _new(EndedRequest, _isend(None, PROC_NULL))


def _refuse(_: MPI.Request) -> bool:
    return False


_take_handle = _refuse if engine is None else engine.take_handle
_keep_handle = _refuse if engine is None else engine.keep_handle
"""Take and keep complete handles of ended requests: calls of the MPI to make and free them would take longer, most of
all after long messages, which leave little of the MPI's code in the caches."""


class GeneralizedHandle:
    """MPI generalized request, which this process completes at the end of a collective."""

    def __init__(self) -> None:
        self._failures: list[bool] = []
        self.request: MPI.Request = MPI.Grequest.Start(_query, None, None, (self._failures,))

    def complete(self, failed: bool) -> None:
        """Complete the MPI request. If `failed`, all waits for it raise an error."""
        if failed:
            self._failures.append(True)
        self.request.Complete()  # type: ignore[attr-defined]


def _query(status: MPI.Status, failures: list[bool]) -> None:
    """Query callback of the generalized request: raises if a failure was recorded, and leaves the status as it is."""
    if failures:
        raise MPI.Exception(MPI.ERR_OTHER)


class SelfMessageHandle:
    """Receive that this process completes by a message to itself. Replaces the generalized request except on Open MPI.

    MPICH and Intel MPI hold a lock while they call `_query`, which needs the interpreter's lock (GIL). A thread that
    holds the GIL and needs MPI's lock would deadlock: in `MPI.Datatype.Free`, or in the first `allreduce` of mpi4py on
    a communicator. Open MPI cannot use this class: it reports no error for a message longer than the receive to a
    thread that already waits for the receive.
    """

    _own: MPI.Intracomm | None = None
    _tags = count()
    _free_tags: ClassVar[list[int]] = []
    _received = bytearray(1), MPI.BYTE
    _fitting, _longer = (bytearray(0), MPI.BYTE), (bytearray(64), MPI.BYTE)

    def __init__(self) -> None:
        self._comm = SelfMessageHandle._own or MPI.COMM_SELF.Dup()
        SelfMessageHandle._own = self._comm
        try:
            self._tag = self._free_tags.pop()  # of no pending receive
        except IndexError:
            self._tag = next(self._tags)
        self.request = self._comm.Irecv(self._received, 0, self._tag)

    def complete(self, failed: bool) -> None:
        """Complete the request by a message. If `failed`, one longer than the receive, so that waits raise an error."""
        self._comm.Send(self._longer if failed else self._fitting, 0, self._tag)
        self._free_tags.append(self._tag)  # the receive was posted before, and has matched


_unused: list[GeneralizedHandle | SelfMessageHandle] = []
"""Pending handles, not completed, that ended requests no longer need. Later requests take them."""

_isend, PROC_NULL = MPI.COMM_SELF.Isend, MPI.PROC_NULL
_new, _wait = MPI.Request.__new__, MPI.Request.Wait
_HANDLE_BYTES, _NULL_ADDRESS = MPI._sizeof(MPI.REQUEST_NULL), MPI._addressof(MPI.REQUEST_NULL)
if engine is not None:
    engine.set_handles(_NULL_ADDRESS - id(MPI.REQUEST_NULL), string_at(_NULL_ADDRESS, _HANDLE_BYTES))

PendingHandle = GeneralizedHandle if MPI.Get_library_version().startswith("Open MPI") else SelfMessageHandle


class NativeRequest(Request, MPI.Request):
    """Non-blocking collective that is also an `MPI.Request`: mpi4py's ``Waitall``, ``Waitany`` and so on accept it.

    Its own `Wait` and `Test` progress it in this thread, which is faster.
    """

    _handle_is_complete = _is_reported = False

    def __bool__(self) -> bool:
        return MPI.Request.__bool__(self)

    def _complete_handle(self) -> None:
        self._handle, handle = None, self._handle
        handle.complete(self._broken)
        self._handle_is_complete = True
        if self._is_reported:
            MPI.Request.Wait(self)

    def _ended_in_wait(self) -> None:
        """Write MPI.REQUEST_NULL into this object, as mpi4py has no setter, and keep the handle for a later request."""
        if self._handle is None:  # Ctrl-C came between this and the end
            return
        copy = memmove if engine is None else engine.copy
        copy(MPI._addressof(self), _NULL_ADDRESS, _HANDLE_BYTES)
        handle = self.__dict__.pop("_handle", None)
        if handle is not None:
            _unused.append(handle)

    def _report(self, status: MPI.Status | None) -> None:
        """Free the handle of the completed MPI request, if there is still one. Fill the status.

        In a signal handler or finalizer that has interrupted `_end`, leave the handle to that.
        """
        with progress_lock:
            self._is_reported = True
            if self._handle_is_complete and MPI.Request.__bool__(self):
                MPI.Request.Wait(self)
        if status is not None:
            super()._report(status)

    def Free(self) -> None:
        super().Free()
        if MPI.Request.__bool__(self) and not self._broken:
            self._report(None)

    free = Free


class EndedRequest(NativeRequest):
    """Request of a collective that had ended when its start returned: only its handle is left to be freed."""

    name = "collective"
    active = is_startable = False
    timeout = None

    def Start(self) -> None:
        """Raise InvalidArgument: the request is not persistent."""
        self._check("Start")
        raise self.not_startable()

    def Wait(self, status: MPI.Status | None = None, timeout: float | None = None) -> Literal[True]:
        """Free the handle, or keep it for a later request, and return True."""
        if timeout is not None:
            seconds_of(timeout)
        if not _keep_handle(self):
            if self._freed:
                self._check("Wait")
            _wait(self)
        if status is not None:
            clear_status(status)
        return True

    Test = Wait
    start = Start

    def take_back(self) -> None:
        """Do nothing: nothing is managed any more."""


def free_unused_handles() -> None:
    """Free the handles kept for later requests, as the program exits."""
    while _unused and not MPI.Is_finalized():
        handle = _unused.pop()
        handle.complete(failed=False)
        handle.request.Wait()
    while not MPI.Is_finalized() and _take_handle(request := MPI.Request()):
        request.Wait()
