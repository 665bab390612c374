"""Requests of non-blocking and persistent collectives, and functions on lists of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import current_thread
from typing import Any, Literal, Protocol

from mpi4py import MPI

from collectives.buffers.staging import DeviceMemory
from collectives.errors import InvalidArgument, RanksDisagree
from collectives.runtime.compiled_program import CompiledProgram, compile_program
from collectives.runtime.program import Program
from collectives.runtime.progress import (
    active_requests,
    lone_requests,
    mpi_is_thread_safe,
    progress,
    progress_lock,
    progress_thread,
    progress_until,
)
from collectives.transport.wire import pause

COMPILE_AFTER = 10
"""Starts of a persistent request at which its program is compiled; loading the compiler takes up to a second."""

_acquire, _release_lock = progress_lock.acquire, progress_lock.release  # half the time of a with statement


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


def start_all(requests: Iterable[Request]) -> None:
    """Start all persistent requests; if one is not idle or is there twice, raise InvalidArgument and start none."""
    several = list(requests)
    for request in several:
        if not request._startable:
            raise request._not_startable()
    if len(set(several)) < len(several):
        raise InvalidArgument(MPI.ERR_REQUEST, "requests: expected each of them once, found one of them twice")
    for request in several:
        request.Start()


def _clear(status: MPI.Status | None) -> None:
    """Fill a status as MPI does for a collective: no message, no source, no error."""
    if status is None:
        return
    status.Set_source(MPI.ANY_SOURCE)
    status.Set_tag(MPI.ANY_TAG)
    status.Set_error(MPI.SUCCESS)
    status.Set_elements(MPI.BYTE, 0)
    status.Set_cancelled(False)


class RequestOwner(Protocol):
    """Interface of what made a request."""

    def release(self, request: Request) -> None:
        """Take back the program of a non-blocking request that has ended, or a persistent one that is freed."""


class Request:
    """Handle of a collective: started by an ``I...`` method, or persistent, created by an ``..._init`` method.

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

    active = False
    """True between start and completion."""

    in_thread = False
    """The progress thread runs a portion of the program, which no other thread may use meanwhile."""

    error: BaseException | None = None
    """Error that aborted the operation in the progress thread, to be raised by `Test` or `Wait`."""

    on_end: Callable[[], object] | None = None
    """Called when the active operation ends."""

    tag: int | None = None
    """MPI tag of the messages between nodes of a non-blocking call."""

    finalizer: weakref.finalize[Any, Any] | None = None
    """Releases the program of a request that is garbage-collected."""

    channel: int | None = None
    """Mailbox channel of a persistent request."""

    holds_program = True
    """Its program may still run, in the thread that waits for it if it is not active."""

    owns_program = False
    """The program of a non-blocking request is not kept for later calls."""

    persistent = False

    device: DeviceMemory | None = None
    """Device of the memory; its stream at the start is that of the whole operation."""

    _handle: Any = None
    """MPI's handle of a `NativeRequest`, to be completed at the end; None once it has ended."""

    _context: Callable[[], AbstractContextManager[None]] | None = None
    _gate: Callable[[], bool] | None = None
    _freed = _broken = _lapsed = _startable = False
    _starts = 0

    def __init__(
        self,
        name: str,
        program: Program | CompiledProgram,
        owner: RequestOwner,
        memory: object,
        persistent: bool = False,
    ) -> None:
        self.name = name
        self.program = program
        self.owner = owner
        self._memory = memory  # is kept until the end
        if persistent:
            self.persistent = self._startable = True

    def __repr__(self) -> str:
        states = {"freed": self._freed, "broken off": self._broken, "under way": self.active}
        states |= {"of a freed communicator": self._lapsed, "idle": True}
        state = next(name for name, applies in states.items() if applies)
        return f"<{'persistent ' if self.persistent else ''}request of {self.name.lower()}, {state}>"

    def __bool__(self) -> bool:
        """False once a non-blocking request is complete, or a persistent one freed, as for a null handle of MPI."""
        return not self._freed if self.persistent else self.active or self._broken

    def __eq__(self, other: object) -> bool:
        return self is other if isinstance(other, Request) or self else other == MPI.REQUEST_NULL

    def __ne__(self, other: object) -> bool:  # MPI.Request has one
        return not self == other

    def __hash__(self) -> int:
        return id(self)

    def Start(self) -> None:
        """Start a persistent request; raises InvalidArgument if it is active, freed, broken or not persistent."""
        _acquire()
        try:
            if not self._startable:
                raise self._not_startable()
            self._startable = False
            if self.device is not None:
                self._context = self.device.capture()
            try:
                self._count_start()
                self.program.start()
            except Exception as error:  # of a message that has arrived already: `Test` and `Wait` raise it
                self._broken = self.program.broken = True
                self.error = error
                return
            except BaseException:
                self._broken = self.program.broken = True
                raise
            self.activate()
        finally:
            _release_lock()

    def _count_start(self) -> None:
        """Compile the program of a persistent request when it has proved to be one."""
        self._starts += 1
        if self._starts == COMPILE_AFTER and isinstance(self.program, Program):
            self.program = compile_program(self.program) or self.program

    def _not_startable(self) -> InvalidArgument:
        return InvalidArgument(MPI.ERR_REQUEST, f"Start of {self!r}: only an idle persistent request starts")

    def begin(self, gate: Callable[[], bool] | None) -> None:
        """Activate the request and start its program: now, or if there is a `gate` as soon as that returns True."""
        with progress_lock:
            if self.device is not None:
                self._context = self.device.capture()
            self._gate = gate
            self.activate()
            if gate is None:
                self._start_program()

    def activate(self) -> None:
        """Activate the request; the caller holds `progress_lock`."""
        self.active = True
        active_requests.append(self)
        if progress_thread.thread is None:
            progress_thread.ensure()
        if self.program.deferred:
            progress_thread.wake()

    def _start_program(self) -> None:
        if self.tag is not None and isinstance(self.program, Program):
            self.program.wire.use_tag(self.tag)
        if self._do(self.program.start):
            self._end()

    def _advance(self) -> None:
        if not self.active or self.in_thread:
            return
        if self._gate is not None:
            if not self._do(self._gate):
                return
            self._gate = None
            self._start_program()
            return
        if self._do(self.program.advance):
            self._end()

    def _advance_within_node(self) -> None:
        """Advance the program if that needs no call of the MPI; `_advance` then completes the request."""
        if self.active and self._gate is None and self.on_end is None and self.program.needs_no_mpi:
            self._do(self.program.advance)

    @property
    def portioned(self) -> CompiledProgram | None:
        """The program if the progress thread can run it now without locks: a compiled one of long messages."""
        program = self.program
        runs = self.active and self._gate is None and program.deferred
        return program if runs and isinstance(program, CompiledProgram) else None

    def _note(self, program: CompiledProgram, result: int) -> None:
        """Take note of the result of a portion of `program`, which the progress thread has run."""
        self.in_thread = False
        self._do(partial(program.note, result))
        if program.ended and mpi_is_thread_safe():
            self._end()

    def _do(self, step: Callable[[], Any]) -> Any:
        """Return `step()`, run in the request's device context; an error aborts the operation and is raised."""
        try:
            if self._context is None:
                return step()
            with self._context():  # other threads have other current streams
                return step()
        except BaseException as error:
            if current_thread() is progress_thread.thread:
                self.error = error
            self._broken = True
            self.program.broken = step is not self._gate  # no message has left before the gate opens
            active_requests.remove(self)
            if not self.persistent:
                self.owner.release(self)
            self._ended()
            raise

    def _complete_handle(self) -> None:
        """Complete `_handle`, which only a `NativeRequest` has."""

    def _ended(self) -> None:
        self.active = False  # last of all: a thread that waits for it continues
        if self._handle is not None:
            self._complete_handle()
        if self.on_end is not None:
            self.on_end()

    def _end(self) -> None:
        active_requests.remove(self)
        self._startable = self.persistent
        self._complete()

    def _complete(self) -> None:
        """End the operation: release the program of a non-blocking call."""
        try:
            if not self.persistent:
                self.owner.release(self)
                self._memory = None
        finally:
            self._ended()

    def lapse(self) -> None:
        """Release an idle request as its communicator is freed: from then on `Start` raises, all other methods work."""
        self.Free()
        self._freed, self._lapsed = False, True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """True if the operation is complete; makes progress if not.

        Raises InvalidArgument if it was freed, RanksDisagree if it was aborted: by Ctrl-C, or an operation that raised.
        """
        complete = self._is_complete("Test")
        if complete:
            self._report(status)
        return complete

    def _is_complete(self, verb: str) -> bool:
        self._check(verb)
        if self.active:
            progress()
        self._check(verb)  # another thread may have aborted it
        return not self.active

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Wait until the operation is complete and return True. Raises as `Test` does."""
        if self.active:
            if len(active_requests) == 1 and self._end_soon():
                if status is not None:
                    _clear(status)
                return True
            if len(active_requests) == 1 and self._deactivate_alone():  # may block in MPI
                self._finish_alone()
            else:
                progress_until(lambda: not self.active)
        self._check("Wait")
        self._report(status)
        return True

    def _end_soon(self) -> bool:
        """Poll for messages of a compiled program; True if that, and no other thread, has ended it."""
        if not isinstance(self.program, CompiledProgram):
            return False
        _acquire()
        try:
            if not self.active or self.in_thread or self._gate is not None or not self._do(self.program.poll):
                return False
            self._ended_in_wait()
            self._end()
            return True
        finally:
            _release_lock()

    def _ended_in_wait(self) -> None:
        """Note that `Wait` of this request itself has seen the end; nothing else has."""

    _report = staticmethod(_clear)

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """True if the operation is complete; makes progress, but leaves the request unchanged."""
        complete = self._is_complete("Get_status")
        if complete:
            _clear(status)
        return complete

    def Cancel(self) -> None:
        """Raise InvalidArgument: collectives cannot be cancelled in MPI."""
        raise InvalidArgument(MPI.ERR_REQUEST, f"Cancel of {self!r}: collectives cannot be cancelled")

    def _deactivate_alone(self) -> bool:
        """Make this request inactive if no other is active, so that no thread progresses it; True if that was done.

        Only requests of which `Wait` may block in MPI.
        """
        _acquire()
        try:
            alone = self.active and not self.in_thread and len(active_requests) == 1 and self._gate is None
            alone = alone and (self.persistent or self.program.prefers_finish)
            if alone:
                active_requests.clear()
                lone_requests.append(self)
                self.active = False
            return alone
        finally:
            _release_lock()

    def _finish_alone(self) -> None:
        """Finish the program of a request that `_deactivate_alone` has made inactive."""
        program = self.program
        try:
            if self._context is None:
                program.finish()
            else:
                with self._context():  # this thread may have another current stream than the start had
                    program.finish()
            self._ended_in_wait()
        except BaseException:
            self._broken = program.broken = True
            raise
        finally:
            with progress_lock:  # another thread may begin a call with the program that this one gives back
                lone_requests.remove(self)
                if not self.persistent:
                    self._complete()
                else:
                    self._startable = not self._broken
                    if self.on_end is not None:
                        self.on_end()

    def Free(self) -> None:
        """Release the request, which must not be active and cannot be used again."""
        self._check("Free")
        if self.active:
            raise InvalidArgument(MPI.ERR_REQUEST, f"Free of {self!r}: wait for it first")
        self._freed, self._startable = True, False
        self._memory = None
        if self.finalizer is not None:
            self.finalizer.detach()
        if self.persistent and not self._lapsed:
            self.owner.release(self)

    start, test, wait, free, cancel, get_status = Start, Test, Wait, Free, Cancel, Get_status
    Startall, Waitall, Testall = staticmethod(start_all), staticmethod(wait_all), staticmethod(test_all)

    def _check(self, verb: str) -> None:
        if self.on_end is not None:
            with progress_lock:  # the thread that has ended it may still be in `on_end`
                pass
        if not (self._freed or self._broken):
            return
        if self._freed:
            raise InvalidArgument(MPI.ERR_REQUEST, f"{verb} of {self!r}: the request was freed")
        if self.error is not None and verb != "Free":
            error, self.error = self.error, None
            raise error
        if self._broken and verb != "Free":
            why = "the operation was aborted by an exception; its messages may still arrive"
            raise RanksDisagree(MPI.ERR_REQUEST, f"{verb} of {self!r}: {why}")
