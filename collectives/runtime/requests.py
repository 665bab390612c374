"""Requests, and the progress of all active ones while any of them waits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from mpi4py import MPI

from collectives.errors import InvalidArgument, RanksDisagree
from collectives.runtime.program import Program
from collectives.transport.wire import pause

Result = TypeVar("Result")

active_requests: list[Request] = []
"""Active requests of this process; changed only while holding `progress_lock`."""

progress_lock = threading.RLock()
"""Held while active requests progress, which any thread may do for all others.

No thread waits for another rank while it holds this lock."""

_acquire, _release_lock = progress_lock.acquire, progress_lock.release  # half the price of a with statement


_progress_count = 0


def progress_count() -> int:
    """Number of times that `progress` was called."""
    return _progress_count


def progress() -> None:
    """Progress all active requests without blocking."""
    global _progress_count
    with progress_lock:
        _progress_count += 1
        for request in tuple(active_requests):
            request._advance()


def progress_until(done: Callable[[], bool]) -> None:
    """Make progress until `done` returns True, yielding the CPU in between."""
    while not done():
        progress()
        if done():
            return
        pause()


def run_program(program: Program) -> None:
    """Run to the end; while other operations are under way, they go on too.

    These may belong to the same communicator, and another thread may move them: what they share with this program,
    such as messages that queue for room, is touched under `turn` only. If nothing is under way, no other thread can
    begin anything on this communicator before the program has ended.
    """
    if not active_requests:
        program.run()
    elif program.waits_in_mpi:
        with_progress_thread(program.run)
    else:
        with progress_lock:
            program.start()
        progress_until(partial(_in_turn, program.advance))


def _in_turn(act: Callable[[], bool]) -> bool:
    with progress_lock:
        return act()


def with_progress_thread(call: Callable[[], Result]) -> Result:
    """Make a call that waits inside MPI; meanwhile a thread moves what is under way, or others might wait for it.

    Needs an MPI that several threads may use at once.
    """
    over, trouble = threading.Event(), []

    def move() -> None:
        try:
            while active_requests and not over.is_set():
                progress()
                pause()
        except BaseException as error:  # of a reduction, say: for the thread that waits
            trouble.append(error)

    thread = threading.Thread(target=move, name="chorus-progress", daemon=True)
    thread.start()
    try:
        result = call()
    finally:
        over.set()
        thread.join()
    for error in trouble:
        raise error
    return result


class Request:
    """A collective that was begun with an ``I...`` method, or bound with an ``..._init`` method.

    It offers what mpi4py's requests offer: `Start` (bound ones only), `Test`, `Wait`, `Get_status`, `Free`, and their
    lower-case spellings; `Cancel` is refused, as MPI has it for collectives. `wait_all` takes lists of them, mixed
    with mpi4py's own.

    Those of ``I...`` methods are `MPI.Request` too, and mpi4py's ``Waitall``, ``Waitany``, ``Testsome`` and so on take
    them in any list (if ``MPI.Query_thread()`` is ``THREAD_MULTIPLE``, which is mpi4py's default). Those of
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

    _trouble: BaseException | None = None
    _afterwards: Callable[[], object] | None = None

    finalizer: weakref.finalize[Any, Any] | None
    """What gives back what the request holds when its last reference is gone."""

    def __init__(
        self,
        name: str,
        program: Program,
        release: Callable[[Request, Program], None],
        keep: object,
        persistent: bool = False,
    ) -> None:
        self._name = name
        self._program = program
        self._release = release
        self._keep = keep
        self._persistent = persistent
        self._gate: Callable[[], bool] | None = None
        self._active = self._freed = self._broken = self._lapsed = False
        self._startable = persistent
        self.finalizer = None

    def __repr__(self) -> str:
        states = {"freed": self._freed, "broken off": self._broken, "under way": self._active}
        states |= {"of a freed communicator": self._lapsed, "idle": True}
        state = next(name for name, it_is in states.items() if it_is)
        return f"<{'persistent ' if self._persistent else ''}request of {self._name}, {state}>"

    def __bool__(self) -> bool:
        """False once it is over, or, if it is persistent, freed: as for a handle of MPI's that is null by then."""
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
        """Begin a bound operation; it must not be under way.

        Raises
        ------
        InvalidArgument
            If it is, was freed or broken off, or comes from an ``I...`` method.
        """
        _acquire()
        try:
            if not self._startable:
                raise self._not_startable()
            self._startable = False
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
        """Go as far as possible without waiting; `gate` must open before anything is sent."""
        with progress_lock:
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

    def _do(self, act: Callable[[], Any]) -> Any:
        """Run a step; any error aborts the operation."""
        try:
            return act()
        except BaseException:
            self._broken = self._program.broken = True
            active_requests.remove(self)
            if not self._persistent:
                self._release(self, self._program)
            self._ended()
            raise

    def _ended(self) -> None:
        """Last of all, as from here on the thread that waits for it may go on."""
        self._active = False
        if self._afterwards is not None:
            self._afterwards()

    def fail(self, error: BaseException) -> None:
        """Keep an error that broke this operation off in a helper thread, for the thread that waits for it."""
        self._trouble = error

    def _end(self) -> None:
        active_requests.remove(self)
        self._startable = self._persistent
        try:
            if not self._persistent:
                self._release(self, self._program)
                self._keep = None
        finally:
            self._ended()

    def when_over(self, act: Callable[[], object]) -> None:
        """Have something done as soon as the operation, which is under way, is over."""
        self._afterwards = act

    def lapse(self) -> None:
        """Give back what the request holds, as its communicator is freed. All that is left to do with it is `Free`."""
        self.Free()
        self._freed, self._lapsed = False, True
        self._release = lambda *_: None

    def Test(self, status: MPI.Status | None = None) -> bool:
        """True if the operation is complete; makes progress if not.

        Raises
        ------
        InvalidArgument
            If it was freed.
        OutOfStep
            If it was broken off, by Ctrl-C or an operation that raised: it never ends.
        """
        self._check("Test")
        if self._active:
            progress()
        self._check("Test")  # another thread may have seen it break off
        if self._active:
            return False
        self._report(status)
        return True

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Return when the operation is over. Raises what `Test` does."""
        if (
            self._persistent and len(active_requests) == 1 and self._leave()
        ):  # nothing else to move: MPI may wait for us
            program = self._program
            try:
                if program.position == program.first:  # as `finish` does it, without the call
                    for call in program.rest:
                        call()
                else:
                    program.finish()
            except BaseException:
                self._broken = self._program.broken = True
                raise
            finally:
                self._startable = not self._broken
                if self._afterwards is not None:
                    self._afterwards()
            if status is not None:
                self._report(status)
            return True
        self._check("Wait")
        progress_until(lambda: not self._active)
        self._check("Wait")
        self._report(status)
        return True

    def _report(self, status: MPI.Status | None) -> None:
        """Fill the status as MPI does for a collective: no message, nobody's, no error."""
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
        """Refuse: collectives cannot be cancelled in MPI.

        Raises
        ------
        InvalidArgument
            Always.
        """
        raise InvalidArgument(MPI.ERR_REQUEST, f"Cancel of {self!r}: collectives cannot be cancelled")

    def _leave(self) -> bool:
        """Take it away from what is under way, if it alone is, so that no other thread moves it any more."""
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
        """Give back what the request holds; it must not be under way and cannot be used again."""
        self._check("Free")
        if self._active:
            raise InvalidArgument(MPI.ERR_REQUEST, f"Free of {self!r}: wait for it first")
        self._freed, self._startable = True, False
        self._keep = None
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
        """Return when all of them are over. They may be of any kind, as for `wait_all`."""
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
        if self._afterwards is not None:
            with progress_lock:  # another thread that has ended it may still be at what comes afterwards
                pass
        if self._freed:
            raise InvalidArgument(MPI.ERR_REQUEST, f"{verb} of {self!r}")
        if self._trouble is not None and verb != "Free":
            trouble, self._trouble = self._trouble, None
            raise trouble
        if self._broken and verb != "Free":
            raise RanksDisagree(MPI.ERR_REQUEST, f"{verb} of {self!r}")

    @property
    def active(self) -> bool:
        """True between start and completion."""
        return self._active


def _clear(status: MPI.Status) -> None:
    """Make it the status of an operation that is no message."""
    status.Set_source(MPI.ANY_SOURCE)
    status.Set_tag(MPI.ANY_TAG)
    status.Set_error(MPI.SUCCESS)
    status.Set_elements(MPI.BYTE, 0)
    status.Set_cancelled(False)


def wait_all(requests: Iterable[Request | MPI.Request]) -> None:
    """Return when all of them are over. They may be of any kind, mpi4py's own among them, in any order.

    Raises
    ------
    InvalidArgument
        If one of them was freed.
    """
    pending = list(requests)
    while not test_all(pending):
        pause()


def test_all(requests: Sequence[Request | MPI.Request]) -> bool:
    """True if all requests are complete; makes progress if not."""
    progress()
    over = [request.Test() for request in requests]  # each of them: a test is also what moves MPI's own
    return all(over)


def start_all(requests: Iterable[Request]) -> None:
    """Start persistent requests, all of them or, if one cannot start, none."""
    several = list(requests)
    for request in several:
        if not request._startable:
            raise request._not_startable()
    for request in several:
        request.Start()
