"""Operations under way: requests, and the progress that every one of them makes while any of them waits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from mpi4py import MPI

from collectives.errors import InvalidArgument, OutOfStep
from collectives.runtime.binder import Program
from collectives.transport.wire import pause

under_way: list[Request] = []
"""Every operation of this process that was begun and is not over."""

_turn = threading.RLock()
_take_turn, _end_turn = _turn.acquire, _turn.release  # half the price of a with statement


def progress() -> None:
    """Move every operation that is under way as far as it goes without waiting."""
    with _turn:
        for request in tuple(under_way):
            request._advance()


def until(done: Callable[[], bool]) -> None:
    """Make progress until `done`, letting other processes run in between."""
    while not done():
        progress()
        if done():
            return
        pause()


def drive(program: Program) -> None:
    """Run to the end; while other operations are under way, they go on too."""
    if under_way:
        program.start()
        until(program.advance)
    else:
        program.run()


def accompanied(call: Callable[[], object]) -> None:
    """Make a call that waits inside MPI; meanwhile a thread moves what is under way, or others might wait for it.

    Needs an MPI that several threads may use at once.
    """
    over, trouble = threading.Event(), []

    def move() -> None:
        try:
            while under_way and not over.is_set():
                progress()
                pause()
        except BaseException as error:  # of a reduction, say: for the thread that waits
            trouble.append(error)

    thread = threading.Thread(target=move, name="chorus-progress", daemon=True)
    thread.start()
    try:
        call()
    finally:
        over.set()
        thread.join()
    for error in trouble:
        raise error


class Request:
    """A collective that was begun with an ``I...`` method, or bound with an ``..._init`` method.

    It offers what mpi4py's requests offer: `Start` (bound ones only), `Test`, `Wait`, `Free`, and their lower-case
    spellings; `wait_all` takes lists of them, mixed with mpi4py's own.

    >>> from mpi4py import MPI
    >>> from collectives import Communicator
    >>> import numpy as np
    >>> comm = Communicator(MPI.COMM_SELF)
    >>> total = np.zeros(3)
    >>> request = comm.Iallreduce(np.ones(3), total)
    >>> request.Wait(), total.tolist()
    (True, [1.0, 1.0, 1.0])
    """

    __slots__ = (
        *("__weakref__", "_active", "_broken", "_freed", "_gate", "_keep", "_name", "_persistent", "_program"),
        *("_release", "_startable", "finalizer"),
    )

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
        self._active = self._freed = self._broken = False
        self._startable = persistent
        self.finalizer = None

    def __repr__(self) -> str:
        states = {"freed": self._freed, "broken off": self._broken, "under way": self._active, "idle": True}
        state = next(name for name, it_is in states.items() if it_is)
        return f"<{'persistent ' if self._persistent else ''}request of {self._name}, {state}>"

    @property
    def program(self) -> Program:
        """What it runs, for those who look into it, such as a trace."""
        return self._program

    def Start(self) -> None:
        """Begin a bound operation; it must not be under way.

        Raises
        ------
        InvalidArgument
            If it is, was freed or broken off, or comes from an ``I...`` method.
        """
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
        under_way.append(self)

    def _not_startable(self) -> InvalidArgument:
        return InvalidArgument(MPI.ERR_REQUEST, f"Start of {self!r}: only an idle persistent request starts")

    def begin(self, gate: Callable[[], bool] | None) -> None:
        """Go as far as possible without waiting; `gate` must open before anything is sent."""
        with _turn:
            self._active = True
            self._gate = gate
            under_way.append(self)
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
        """Act; whatever goes wrong ends the operation."""
        try:
            return act()
        except BaseException:
            self._active, self._broken, self._program.broken = False, True, True
            under_way.remove(self)
            if not self._persistent:
                self._release(self, self._program)
            raise

    def _end(self) -> None:
        self._active = False
        under_way.remove(self)
        self._startable = self._persistent
        if not self._persistent:
            self._release(self, self._program)
            self._keep = None

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Whether the operation is over; makes progress if it is not.

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
        return not self._active

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Return when the operation is over. Raises what `Test` does."""
        if self._active and self._persistent and len(under_way) == 1:  # nothing else to move: MPI may wait for us
            program = self._program
            try:
                _take_turn()
                under_way.clear()
                _end_turn()
                self._active = False
                if program.position == program.first:  # as `finish` does it, without the call
                    for call in program.rest:
                        call()
                else:
                    program.finish()
            except BaseException:
                self._broken = self._program.broken = True
                raise
            self._startable = True
            return True
        self._check("Wait")
        until(lambda: not self._active)
        self._check("Wait")
        return True

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

    start, test, wait, free = Start, Test, Wait, Free

    def _check(self, verb: str) -> None:
        if self._freed:
            raise InvalidArgument(MPI.ERR_REQUEST, f"{verb} of {self!r}")
        if self._broken and verb != "Free":
            raise OutOfStep(MPI.ERR_REQUEST, f"{verb} of {self!r}")

    @property
    def active(self) -> bool:
        """Whether the operation is under way."""
        return self._active


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
    """Whether all of them are over; makes progress if not."""
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
