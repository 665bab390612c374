"""Requests of non-blocking and persistent collectives, and functions on lists of them."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Literal

from mpi4py import MPI

from collectives.engine.instructions import DONE, REFUSED, WAITING
from collectives.errors import InvalidArgument, RanksDisagree
from collectives.runtime.execution.operation import Operation
from collectives.runtime.execution.progress import (
    active_requests,
    lone_requests,
    progress,
    progress_lock,
    progress_thread,
    progress_until,
)
from collectives.runtime.requests.request_lists import start_all, test_all, wait_all
from collectives.transport.waits import Deadline, pause_after_test


def clear_status(status: MPI.Status | None) -> None:
    """Fill a status as MPI does for a collective: no message, no source, no error."""
    if status is None:
        return
    status.Set_source(MPI.ANY_SOURCE)
    status.Set_tag(MPI.ANY_TAG)
    status.Set_error(MPI.SUCCESS)
    status.Set_elements(MPI.BYTE, 0)
    status.Set_cancelled(False)


def interrupted() -> Operation | None:
    """Operation of which this frame, of a signal handler or finalizer, has interrupted a step. None if there is none.

    It stands still until the frame returns, and other ranks may wait for it. The caller holds `progress_lock`.
    """
    here = threading.get_ident()
    alone = [one for one in lone_requests if one._lone_thread == here and not one.program.is_reentrant]
    return alone[0] if alone else Operation.stepped


class Request(Operation):
    """Handle of a collective: started by an ``I...`` method, or persistent, created by an ``..._init`` method.

    It has the methods of mpi4py's requests: `Start` (persistent requests only), `Test`, `Wait`, `Get_status`, `Free`,
    and their lower-case forms, of which `wait` returns None and `test` a pair; `Cancel` raises, as MPI has it for
    collectives. `wait_all` takes lists of requests, including mpi4py's own.

    Signal handlers and finalizers may call these methods too, and those of `Communicator` on other communicators. There
    `Wait` raises RanksDisagree if it has interrupted a step of a request, for which other ranks may wait.

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

    finalizer: weakref.finalize[Any, Any] | None = None
    """Releases the program of a request that is garbage-collected."""

    channel: int | None = None
    """Mailbox channel of a persistent request. Of a non-blocking one that holds its channel, the number of that."""

    _freed = _lapsed = False

    def __repr__(self) -> str:
        states = {"freed": self._freed, "broken off": self._broken, "under way": self.active}
        states |= {"of a freed communicator": self._lapsed, "idle": True}
        state = next(name for name, applies in states.items() if applies)
        if state == "under way":
            state = f"under way: waits {self.waits_for()}"
        return f"<{'persistent ' if self.persistent else ''}request of {self.name.lower()}, {state}>"

    @property
    def moves(self) -> int:
        """Number that changes with progress."""
        return self.program.moves

    def stall(self, idle: float) -> None:
        """Look at the ranks that the operation waits for."""
        if not self.is_queued:
            self.program.stall(idle)

    def describe(self, subject: str) -> str:
        """Sentence on what the operation waits for."""
        return f"{self.program.label}: {subject} {self.waits_for()}"

    def waits_for(self) -> str:
        """Description of what the operation waits for."""
        if self.is_queued:
            return "for earlier calls"
        return self.program.waits_for() if self._gate is None else "for other ranks to make this call"

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
        """Start a persistent request. Raises InvalidArgument if it is active, freed, broken or not persistent."""
        result = self.program.engine.start(self)
        if result == REFUSED:
            self._start()
        elif result == WAITING:
            progress_thread.ensure()

    def _start(self) -> None:
        with progress_lock:
            self.take_back()
            if not self._startable:
                raise self.not_startable()
            try:
                self._startable = False
                if self.device is not None:
                    self._context = self.device.capture()
                self._startable = self.program.start()
                if not self._startable:
                    self.activate()
            except BaseException as error:  # also of a message that has arrived already
                self._break_off(error)
                if not isinstance(error, Exception):
                    raise
                return
            self._hand_over()

    def not_startable(self) -> InvalidArgument:
        return InvalidArgument(MPI.ERR_REQUEST, f"Start of {self!r}: only an idle persistent request starts")

    def lapse(self) -> None:
        """Release an idle request as its communicator is freed: from then on `Start` raises, all other methods work."""
        self.Free()
        self._freed, self._lapsed = False, True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """True if the operation is complete. Makes progress if not.

        Raises InvalidArgument if it was freed, RanksDisagree if it was aborted: by Ctrl-C, or an operation that raised.
        """
        try:
            if self.program.engine.end(self) == DONE:
                self._ended_by_compiled_code(status)
                return True
        except BaseException:
            self._complete_if_ended()
            raise
        complete = self._is_complete("Test")
        pause_after_test(complete)
        if complete:
            self._report(status)
        return complete

    def _is_complete(self, verb: str) -> bool:
        self._check(verb)
        if self.active:
            progress()
        self._check(verb)  # another thread may have aborted it
        return self.is_done

    def Wait(self, status: MPI.Status | None = None, timeout: float | None = None) -> Literal[True]:
        """Wait until the operation is complete and return True. Raises as `Test` does.

        After `timeout` seconds it raises `collectives.errors.Timeout`, and leaves the request active: the next `Wait`
        may complete it. Default: the time limit of the communicator.
        """
        limit = None if timeout is None else Deadline(timeout, self.owner.rank)
        try:
            if self.program.engine.end(self, True) == DONE:
                self._ended_by_compiled_code(status)
                return True
        except BaseException:
            self._complete_if_ended()
            raise
        if limit is None and self.timeout is not None:
            limit = Deadline(self.timeout, self.owner.rank)
        if limit is None:
            self._wait()
        else:
            with limit:
                self._wait(may_block=False)
        self._check("Wait")
        self._report(status)
        return True

    def wait(self, status: MPI.Status | None = None, timeout: float | None = None) -> None:
        """`Wait`, but return the received object as mpi4py's method does: None for a collective."""
        self.Wait(status, timeout)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """`Test`, but return a pair with the received object as mpi4py's method does: None for a collective."""
        return self.Test(status), None

    def _ended_by_compiled_code(self, status: MPI.Status | None) -> None:
        if not self.persistent:
            with progress_lock:
                self._ended_in_wait()
                self._end()
        if status is not None:
            clear_status(status)

    @property
    def timeout(self) -> float | None:
        """Seconds of a `Wait` without a time limit of its own. None for no limit."""
        return self.owner.timeout

    def _wait(self, may_block: bool = True) -> None:
        with progress_lock:
            self.take_back()
            if not self.is_done and interrupted() is not None:  # that stands still until this frame returns
                why = f"a signal handler or finalizer has interrupted a step of {interrupted()!r}"
                raise RanksDisagree(MPI.ERR_PENDING, f"Wait of {self!r}: {why}; Test returns False until it has ended")
        if self.is_done or (len(active_requests) == 1 and self._end_soon()):
            return
        if self._is_lone and self.program.is_reentrant:
            self.program.finish()
        elif not (may_block and len(active_requests) == 1 and self._finish_alone()):
            progress_until(self._has_ended, self)

    def _has_ended(self) -> bool:
        if self.is_queued:
            self.owner.catch_up(self)
        return self.is_done

    def _end_soon(self) -> bool:
        """Poll for messages within the node. True if that, and no other thread, has ended the program."""
        if not self.program.needs_no_mpi:
            return False
        with progress_lock:
            if not (self._runs and self._poll()):
                return False
            self._ended_in_wait()
            self._end()
            return True

    def _poll(self) -> bool:
        program = self.program
        return bool(self._do(program.poll)) if program.is_reentrant else self._run_step(program.poll)

    def _ended_in_wait(self) -> None:
        """Note that `Wait` of this request itself has seen the end. Nothing else has."""

    def _finish_alone(self) -> bool:
        """Finish the program in this thread, if no other request is active. True if that was done.

        Only of requests of which `Wait` may block in MPI. No other thread progresses the request meanwhile.
        """
        program = self.program
        try:
            with progress_lock:
                alone = self._runs and len(active_requests) == 1
                if not alone:
                    return False
                self._lone_thread = threading.get_ident()
                lone_requests.append(self)
                self._deactivate()
            if self._context is None:
                program.finish()
            else:
                with self._context():  # this thread may have another current stream than the start had
                    program.finish()
            self._leave_lone()
        except BaseException as error:
            self._leave_lone(error)
            if not isinstance(error, Exception):
                raise
        return True

    def _leave_lone(self, error: BaseException | None = None) -> None:
        """End a request that `_finish_alone` has finished, or broken off by an `error`. A no-op for others."""
        with progress_lock:  # another thread may begin a call with the program that this one gives back
            if not self._is_lone:
                return
            if error is not None and self.holds_program:
                self._break_off(error)
                return
            if error is None:
                self._ended_in_wait()
            self._end()

    _report = staticmethod(clear_status)

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """True if the operation is complete. Makes progress, but leaves the request unchanged."""
        complete = self._is_complete("Get_status")
        pause_after_test(complete)
        if complete:
            clear_status(status)
        return complete

    def Cancel(self) -> None:
        """Raise InvalidArgument: collectives cannot be cancelled in MPI."""
        raise InvalidArgument(MPI.ERR_REQUEST, f"Cancel of {self!r}: collectives cannot be cancelled")

    def Free(self) -> None:
        """Release the request, which must not be active and cannot be used again."""
        self._check("Free")
        with progress_lock:
            self.take_back()
            if self._active:
                raise InvalidArgument(MPI.ERR_REQUEST, f"Free of {self!r}: wait for it first")
        self._freed, self._startable = True, False
        if not self._broken:
            self._memory = None
        if self.finalizer is not None:
            self.finalizer.detach()
        if self.persistent and not self._lapsed:
            self.owner.release(self)

    start, free, cancel, get_status = Start, Free, Cancel, Get_status
    Startall, Waitall, Testall = staticmethod(start_all), staticmethod(wait_all), staticmethod(test_all)

    def _check(self, verb: str) -> None:
        if self.on_end is not None:
            with progress_lock:  # the thread that has ended it may still be in `on_end`
                pass
        if self.error is None and not (self._freed or self._broken):
            return
        if self._freed:
            raise InvalidArgument(MPI.ERR_REQUEST, f"{verb} of {self!r}: the request was freed")
        if self.error is not None and verb != "Free":
            error, self.error = self.error, None
            raise error
        if self._broken and verb != "Free":
            why = "the operation was aborted by an exception; its messages may still arrive"
            raise RanksDisagree(MPI.ERR_REQUEST, f"{verb} of {self!r}: {why}")
