"""A collective under way: start, progress and end of its program, without the methods that users call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

from collectives.buffers.device_memory import DeviceMemory
from collectives.engine.instructions import DONE, HAS_THREAD, REFUSED, WAITING
from collectives.runtime.execution.program import Placement, Program
from collectives.runtime.execution.progress import (
    ProgramOwner,
    active_requests,
    contains,
    discard,
    lone_requests,
    mpi_is_thread_safe,
    orphans,
    progress_lock,
    progress_thread,
    progress_words,
)


def _open() -> bool:
    """Gate of an operation that need not wait."""
    return True


class Operation:
    """A bound program and the state of its run: `begin` or `activate`, then `_advance` by any thread up to the end.

    Python code changes the state while holding `progress_lock`. The operations of compiled programs are managed by
    compiled code where possible (`collectives.engine`), from a start until `take_back`.

    A signal handler or a finalizer may interrupt a thread at any point, and wait for requests there. The lock does not
    keep it out, as the thread has it. A frame that holds the lock and finds `_running` or `_ending` has interrupted the
    frame that set it.
    """

    stepped: ClassVar[Operation | None] = None
    """The operation of which a step runs now."""

    _running = False
    """A step of the program runs that no frame may start again."""

    _ending = False
    """`_end` runs: the result is complete."""

    _lone_thread: int | None = None
    """Identifier of the thread that completes the operation by itself (`lone_requests`)."""

    in_thread = False
    """The progress thread runs a portion of the program, which no other thread may use meanwhile."""

    error: BaseException | None = None
    """Error that aborted the operation, in any thread, to be raised by its `Test` or `Wait`."""

    on_end: Callable[[], object] | None = None
    """Called when the active operation ends."""

    tag: int | None = None
    """MPI tag of the messages between nodes of a non-blocking call."""

    placement: Placement = (), 0
    """Addresses of the call's memories, and its length, for `Program.place` before the start."""

    is_queued = False
    """Waits for the calls before on its channel."""

    holds_program = True
    """Its program may still run, in the thread that waits for it if it is not active."""

    owns_program = False
    """The program of a non-blocking request is not kept for later calls."""

    persistent = False

    device: DeviceMemory | None = None
    """Device of the memory. Its stream at the start is that of the whole operation."""

    _handle: Any = None
    """MPI's handle of a `NativeRequest`, to be completed at the end. None once it has ended."""

    _context: Callable[[], AbstractContextManager[None]] | None = None
    _gate: Callable[[], bool] | None = None
    _broken = False
    _active = _startable = False
    """Active, or an idle persistent request, and managed by Python. Not while compiled code manages it."""

    def __init__(
        self,
        name: str,
        program: Program,
        owner: ProgramOwner,
        memory: object,
        persistent: bool = False,
    ) -> None:
        self.name = name
        self.program = program
        self.owner = owner
        self._memory = memory  # is kept until the end
        if persistent:
            self.persistent = self._startable = True

    @property
    def active(self) -> bool:
        """True between start and completion."""
        return self._active or self.is_queued or self.program.engine.runs_for(self)

    @property
    def is_done(self) -> bool:
        """True if nothing of the program is left to be run. `_end` may be under way."""
        return self._ending or not (self.active or self._is_lone)

    @property
    def _is_lone(self) -> bool:
        return contains(lone_requests, self)

    def has_begun(self) -> bool:
        """True once the gate of `begin` has opened, or the operation was aborted."""
        return self._gate is None or not self._active

    @property
    def is_startable(self) -> bool:
        """True for an idle persistent request."""
        return self._startable or self.program.is_startable

    def begin(self, gate: Callable[[], bool] | None) -> None:
        """Activate the request and start its program: now, or if there is a `gate` as soon as that returns True."""
        with progress_lock:
            self.program.assemble()
            if self.device is not None:
                self._context = self.device.capture()
            self._gate = gate or _open  # should Ctrl-C come before the start, the next progress starts it
            self.activate()
            if gate is None:
                self._start_program()

    def activate(self) -> None:
        """Activate the request. The caller holds `progress_lock`."""
        self._active = True
        active_requests.append(self)
        if not progress_words[HAS_THREAD]:
            progress_thread.ensure()
        if self.program.deferred:
            progress_thread.wake()

    def start_on(self, sendbuf: Any, recvbuf: Any) -> None:
        """Start the program on arrays that it accepts."""
        if self.program.start_on(sendbuf, recvbuf) == DONE:
            self._end()
        else:
            self.resume(self.program)

    def resume(self, program: Program) -> None:
        """Activate the request of a `program` that `start_on` has started. Compiled code goes on with it, if it can."""
        result = program.engine.activate(self) if mpi_is_thread_safe() and not program.deferred else REFUSED
        if result == REFUSED:
            with progress_lock:
                self.activate()
        elif result == WAITING:
            progress_thread.ensure()

    def _start_program(self) -> None:
        if self._run_step(self._pass_gate):
            self._end()

    def _pass_gate(self) -> bool:
        if self._gate is None:  # a frame that has interrupted this one has started the program
            return False
        self._gate = None
        if self.tag is not None:
            self.program.use_tag(self.tag)
        self.program.place(*self.placement)
        return self.program.start()

    def _run_step(self, step: Callable[[], bool]) -> bool:
        """Return the result of `_do`, of a step that no other frame may run meanwhile.

        The collector pauses, as its finalizers may wait for this request.
        """
        collects, outer, ended = gc.isenabled(), Operation.stepped, False
        try:
            gc.disable()
            self._running, Operation.stepped = True, self
            if self._active and self.holds_program:
                ended = self._do(step)
        finally:
            self._running, Operation.stepped = False, outer
            if collects:
                gc.enable()
        return bool(ended)

    def _go_on(self) -> bool:
        """Advance the program. True if it has ended."""
        program = self.program
        return bool(self._do(program.advance)) if program.is_reentrant else self._run_step(program.advance)

    def _advance(self) -> None:
        if self.is_queued:
            return
        if not self._active:
            self._advance_compiled()
        elif self._running or self._ending or (self.in_thread and not progress_thread.is_current):
            return
        elif self._broken or not self.holds_program:  # Ctrl-C has interrupted `_end`
            self._end()
        elif self._gate is not None:
            if self._do(self._gate):
                self._start_program()
        elif self._go_on():
            self._end()

    def _advance_compiled(self) -> None:
        """Advance the request if compiled code manages it."""
        try:
            result = self.program.engine.end(self)
        except BaseException:
            self._complete_if_ended()
            raise
        if result == DONE and not self.persistent:
            self._end()
        elif result > REFUSED:  # an error
            self.take_back()
            self._advance()

    def _advance_within_node(self) -> None:
        """Advance the program if that needs no call of the MPI. `_advance` then completes the request."""
        if self._runs and self.on_end is None and self.program.needs_no_mpi:
            self._go_on()

    @property
    def portioned(self) -> Program | None:
        """The program if the progress thread can run it now without locks: a compiled one of long messages."""
        program = self.program
        return program if self._runs and program.deferred and program.is_compiled else None

    @property
    def _runs(self) -> bool:
        """True if any thread may run the program: it has begun, and `_end` has not."""
        begun = self._active and self._gate is None and self.holds_program
        return begun and not (self.in_thread or self._broken or self._running or self._ending)

    def _note(self, program: Program, result: int) -> None:
        """Take note of the result of a portion of `program`, which the progress thread has run."""
        self.in_thread = False
        self._do(partial(program.note, result))
        if self._active and program.ended and mpi_is_thread_safe():
            self._end()

    def _do(self, step: Callable[[], Any]) -> Any:
        """Return `step()`, run in the request's device context. An error aborts the operation, and is not raised here.

        That is for `Test` or `Wait` of this request, as any call may progress it; Ctrl-C is raised.
        """
        try:
            if self._context is None:
                return step()
            with self._context():  # other threads have other current streams
                return step()
        except BaseException as error:
            # No message leaves before the gate opens, but after Ctrl-C the call is left out on this rank only.
            self._break_off(error, step is not self._gate or not isinstance(error, Exception))
            if not isinstance(error, Exception):
                raise
            return None

    def _break_off(self, error: BaseException, in_program: bool = True) -> None:
        """Mark the operation as aborted and end it. Keep an error for `Test` or `Wait`, and the memory in `orphans`."""
        if isinstance(error, Exception):
            self.error = error
        self._broken = True
        if in_program:
            self.program.leave()
            orphans.append(self)
        self._end()

    def _complete_handle(self) -> None:
        """Complete `_handle`, which only a `NativeRequest` has."""

    def _end(self) -> None:
        """End the operation: release the program of a non-blocking call. After Ctrl-C it can be called again.

        The caller holds `progress_lock`. The memory goes last, as finalizers of the user's may run then.
        """
        if self._ending:
            return
        collects, outer = gc.isenabled(), Operation.stepped
        try:
            gc.disable()
            Operation.stepped = self  # requests queued behind it start only after this: a handler cannot wait for them
            self._ending = True
            self._release()
        finally:
            self._ending, Operation.stepped = False, outer
            if collects:
                gc.enable()
        if not (self.persistent or self._broken):
            self._memory = None

    def _release(self) -> None:
        if self.holds_program and not self.persistent:
            self.owner.release(self)
        self._startable = self.persistent and not self._broken
        try:
            if self._active:
                self._deactivate()  # last of all: a thread that waits for it continues
            discard(lone_requests, self)
        finally:
            if self._handle is not None:
                self._complete_handle()
            if self.on_end is not None:
                self.on_end()

    def _deactivate(self) -> None:
        self._active = False
        try:  # Ctrl-C cannot come in between
            active_requests.remove(self)
        except ValueError:
            discard(active_requests, self)

    def _complete_if_ended(self) -> None:
        """Complete a non-blocking operation that compiled code has ended, as Ctrl-C may have taken that result."""
        with progress_lock:
            ended = self.holds_program and not (self.persistent or self.active or self._is_lone)
            if ended and self.program.is_compiled:
                self._end()

    def _hand_over(self) -> None:
        """Let compiled code manage a persistent request just started, if it can. The caller holds `progress_lock`."""
        program = self.program
        if program.is_compiled and not program.deferred and mpi_is_thread_safe():
            program.engine.manage(self, self._active)
            self._active = self._startable = False

    def take_back(self) -> None:
        """Manage the request in Python from now on. The caller holds `progress_lock`."""
        if self.program.engine.runs_for(self):
            self._active = True  # no thread may see it inactive in between
        elif not self.program.is_startable:
            return
        if self.program.engine.take_back(self) == DONE:
            self._startable = True
        if self._active and not contains(active_requests, self):  # it has ended in between
            self._active = False
