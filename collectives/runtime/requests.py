"""Requests of non-blocking and persistent collectives, and functions on lists of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from mpi4py import MPI

from collectives.errors import InvalidArgument, RanksDisagree
from collectives.runtime.call import Call, call_device
from collectives.runtime.program import Program
from collectives.runtime.progress import active_requests, progress, progress_lock, progress_until
from collectives.transport.wire import pause

_acquire, _release_lock = progress_lock.acquire, progress_lock.release  # half the time of a with statement


class Request:
    """A collective started by an ``I...`` method, or bound by an ``..._init`` method.

    It has the methods of mpi4py's requests: `Start` (persistent requests only), `Test`, `Wait`, `Get_status`, `Free`,
    and their lower-case forms; `Cancel` raises, as MPI has it for collectives. `wait_all` takes lists of requests,
    including mpi4py's own.

    Requests of ``I...`` methods are `MPI.Request` too, and mpi4py's ``Waitall``, ``Waitany``, ``Testsome`` and so on
    take them in any list (if ``MPI.Query_thread()`` is ``THREAD_MULTIPLE``, which is mpi4py's default). Those of
    ``..._init`` methods are not, since a handle that the MPI could start would cost as much as the collective; the
    class methods `Startall`, `Waitall` and `Testall` of this class take lists of any kind.

    >>> from mpi4py import MPI
    >>> from collectives import Communicator
    >>> import numpy as np
    >>> comm = Communicator(MPI.COMM_SELF)
    >>> total = np.zeros(3)
    >>> request = comm.Iallreduce(np.ones(3), total)
    >>> request.Wait(), total.tolist()
    (True, [1.0, 1.0, 1.0])
    """

    _error: BaseException | None = None
    _on_end: Callable[[], object] | None = None

    finalizer: weakref.finalize[Any, Any] | None
    """Releases the program of a request that is garbage-collected."""

    def __init__(
        self,
        name: str,
        program: Program,
        release: Callable[[Request, Program], None],
        call: Call | None,
        persistent: bool = False,
    ) -> None:
        self._name = name
        self._program = program
        self._release = release
        self._call = call
        self._device = None if call is None else call_device(call)
        self._context: Callable[[], AbstractContextManager[None]] | None = None
        self._persistent = persistent
        self._gate: Callable[[], bool] | None = None
        self._active = self._freed = self._broken = self._lapsed = False
        self._startable = persistent
        self.finalizer = None

    def __repr__(self) -> str:
        states = {"freed": self._freed, "broken off": self._broken, "under way": self._active}
        states |= {"of a freed communicator": self._lapsed, "idle": True}
        state = next(name for name, applies in states.items() if applies)
        return f"<{'persistent ' if self._persistent else ''}request of {self._name}, {state}>"

    def __bool__(self) -> bool:
        """False once it is complete, or, if it is persistent, freed, as for a null handle of MPI."""
        return not self._freed if self._persistent else self._active or self._broken

    def __eq__(self, other: object) -> bool:
        return self is other if isinstance(other, Request) or self else other == MPI.REQUEST_NULL

    def __ne__(self, other: object) -> bool:  # MPI.Request has one
        return not self == other

    def __hash__(self) -> int:
        return id(self)

    @property
    def program(self) -> Program:
        """The program of the request, for tracing."""
        return self._program

    def Start(self) -> None:
        """Start a persistent request; raises InvalidArgument if it is active, freed, broken or not persistent."""
        _acquire()
        try:
            if not self._startable:
                raise self._not_startable()
            self._startable = False
            if self._device is not None:
                self._context = self._device.capture()
            try:
                for call in self._program.opening:
                    call()
            except BaseException:
                self._broken = self._program.broken = True
                raise
            self._active = True
            active_requests.append(self)
        finally:
            _release_lock()

    def _not_startable(self) -> InvalidArgument:
        return InvalidArgument(MPI.ERR_REQUEST, f"Start of {self!r}: only an idle persistent request starts")

    def begin(self, gate: Callable[[], bool] | None) -> None:
        """Progress as far as possible without waiting, once `gate` returns True."""
        with progress_lock:
            if self._device is not None:
                self._context = self._device.capture()
            self._active = True
            self._gate = gate
            active_requests.append(self)
            if gate is None:
                self._do(self._program.start)
                self._advance()

    def _advance(self) -> None:
        if not self._active:
            return
        if self._gate is not None:
            if not self._do(self._gate):
                return
            self._gate = None
            self._do(self._program.start)
        if self._do(self._program.advance):
            self._end()

    def _do(self, step: Callable[[], Any]) -> Any:
        """Run a step; any error aborts the operation."""
        try:
            if self._context is None:
                return step()
            with self._context():  # other threads have other current streams
                return step()
        except BaseException:
            self._broken = self._program.broken = True
            active_requests.remove(self)
            if not self._persistent:
                self._release(self, self._program)
            self._ended()
            raise

    def _ended(self) -> None:
        self._active = False  # last of all: a thread that waits for it continues
        if self._on_end is not None:
            self._on_end()

    def fail(self, error: BaseException) -> None:
        """Store the error that aborted this operation in a helper thread, to be raised by `Test` or `Wait`."""
        self._error = error

    def _end(self) -> None:
        active_requests.remove(self)
        self._startable = self._persistent
        try:
            if not self._persistent:
                self._release(self, self._program)
                self._call = None
        finally:
            self._ended()

    def call_at_end(self, call: Callable[[], object]) -> None:
        """Set a call to run when the active operation ends."""
        self._on_end = call

    def lapse(self) -> None:
        """Release the program, as the communicator is freed. Only `Free` is valid then."""
        self.Free()
        self._freed, self._lapsed = False, True
        self._release = lambda *_: None

    def Test(self, status: MPI.Status | None = None) -> bool:
        """True if the operation is complete; makes progress if not.

        Raises InvalidArgument if it was freed, RanksDisagree if it was aborted: by Ctrl-C, or an operation that raised.
        """
        self._check("Test")
        if self._active:
            progress()
        self._check("Test")  # another thread may have aborted it
        if self._active:
            return False
        self._report(status)
        return True

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Return when the operation is complete. Raises as `Test` does."""
        if self._persistent and len(active_requests) == 1 and self._deactivate_alone():  # may block in MPI
            program = self._program
            try:
                if program.position == program.first:  # as in `finish`, without the call
                    for call in program.rest:
                        call()
                else:
                    program.finish()
            except BaseException:
                self._broken = self._program.broken = True
                raise
            finally:
                self._startable = not self._broken
                if self._on_end is not None:
                    self._on_end()
            if status is not None:
                self._report(status)
            return True
        self._check("Wait")
        progress_until(lambda: not self._active)
        self._check("Wait")
        self._report(status)
        return True

    def _report(self, status: MPI.Status | None) -> None:
        if status is not None:
            _clear(status)

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """True if the operation is complete; makes progress, but leaves the request unchanged."""
        self._check("Get_status")
        if self._active:
            progress()
        self._check("Get_status")
        if not self._active and status is not None:
            _clear(status)
        return not self._active

    def Cancel(self) -> None:
        """Raise InvalidArgument: collectives cannot be cancelled in MPI."""
        raise InvalidArgument(MPI.ERR_REQUEST, f"Cancel of {self!r}: collectives cannot be cancelled")

    def _deactivate_alone(self) -> bool:
        """Remove this request from the active ones if it is the only one: no other thread progresses it then."""
        _acquire()
        try:
            alone = self._active and len(active_requests) == 1
            if alone:
                active_requests.clear()
                self._active = False
            return alone
        finally:
            _release_lock()

    def Free(self) -> None:
        """Release the request, which must not be active and cannot be used again."""
        self._check("Free")
        if self._active:
            raise InvalidArgument(MPI.ERR_REQUEST, f"Free of {self!r}: wait for it first")
        self._freed, self._startable = True, False
        self._call = None
        if self.finalizer is not None:
            self.finalizer.detach()
        if self._persistent:
            self._release(self, self._program)

    start, test, wait, free, cancel, get_status = Start, Test, Wait, Free, Cancel, Get_status

    @classmethod
    def Startall(cls, requests: Sequence[Request]) -> None:
        """See `start_all`."""
        start_all(requests)

    @classmethod
    def Waitall(
        cls, requests: Sequence[Request | MPI.Request], statuses: list[MPI.Status] | None = None
    ) -> Literal[True]:
        """Return when all are complete; as for `wait_all`, of any kind."""
        while not cls.Testall(requests, statuses):
            pause()
        return True

    @classmethod
    def Testall(cls, requests: Sequence[Request | MPI.Request], statuses: list[MPI.Status] | None = None) -> bool:
        """True if all requests, of any kind, are complete; none is released before all are."""
        progress()
        if not all([request.Get_status() for request in requests]):
            return False
        if statuses is not None:
            statuses.extend(MPI.Status() for _ in range(len(requests) - len(statuses)))
        for index, request in enumerate(requests):
            request.Wait(None if statuses is None else statuses[index])
        return True

    def _check(self, verb: str) -> None:
        if self._on_end is not None:
            with progress_lock:  # the thread that has ended it may still be in `_on_end`
                pass
        if self._freed:
            raise InvalidArgument(MPI.ERR_REQUEST, f"{verb} of {self!r}")
        if self._error is not None and verb != "Free":
            error, self._error = self._error, None
            raise error
        if self._broken and verb != "Free":
            raise RanksDisagree(MPI.ERR_REQUEST, f"{verb} of {self!r}")

    @property
    def active(self) -> bool:
        """True between start and completion."""
        return self._active


def _clear(status: MPI.Status) -> None:
    """Fill a status as MPI does for a collective: no message, no source, no error."""
    status.Set_source(MPI.ANY_SOURCE)
    status.Set_tag(MPI.ANY_TAG)
    status.Set_error(MPI.SUCCESS)
    status.Set_elements(MPI.BYTE, 0)
    status.Set_cancelled(False)


def wait_all(requests: Iterable[Request | MPI.Request]) -> None:
    """Return when all requests are complete: Chorus's and mpi4py's, in any order. Raises if one of them was freed."""
    pending = list(requests)
    while not test_all(pending):
        pause()


def test_all(requests: Sequence[Request | MPI.Request]) -> bool:
    """True if all requests are complete; makes progress if not."""
    progress()
    return all([request.Test() for request in requests])  # every one: tests also progress MPI's own


def start_all(requests: Iterable[Request]) -> None:
    """Start persistent requests; none if one of them cannot start."""
    several = list(requests)
    for request in several:
        if not request._startable:
            raise request._not_startable()
    for request in several:
        request.Start()
