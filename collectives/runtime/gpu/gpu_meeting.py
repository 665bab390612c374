"""Programs that begin with a meeting of ranks with arrays on GPUs. And the count of calls with arrays on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mpi4py import MPI

from collectives.buffers.device_memory import DeviceMemory
from collectives.errors import Mismatch
from collectives.runtime.execution.local_steps import call_rounds
from collectives.runtime.execution.program import Program
from collectives.transport.gpu.gpu_channel import ON_HOST, GpuChannel
from collectives.transport.wire import NoMessages
from collectives.types import Wait

Bind = Callable[[], Program]


class _MeetingWire(NoMessages):
    """Transport of a program that uses the meetings of its channel. It frees inner programs."""

    in_mailboxes = True

    def __init__(self, steps: MeetingSteps) -> None:
        self._steps = steps

    def free(self) -> None:
        for program in self._steps.inner.values():
            program.free()


def counted(program: Program, channel: GpuChannel) -> Program:
    """Let a program for the host count its calls, so that ranks with arrays on the GPU do not wait for this one."""
    program.rounds.insert(0, [[channel.count]])
    program.begins = tuple((index, position + 1) for index, position in program.begins)
    program.runs_native = None  # it would run without the first round
    return program


class MeetingSteps:
    """A meeting and what follows it as one step of a program, which may be tested or waited for."""

    def __init__(self, channel: GpuChannel) -> None:
        self._channel = channel
        self._active: Iterator[None] | None = None
        self.is_waited_for = False
        """True if the caller does nothing but wait for the call."""

        self.inner: dict[Bind, Program] = {}
        """Programs that were bound in calls, by the functions that bind them."""

    def _run(self) -> Iterator[None]:
        raise NotImplementedError

    def run_inner(self, bind: Bind) -> Iterator[None]:
        """Run a program, bound in the first call that needs it."""
        program = self.bound(bind)
        ended = program.start()
        while not ended:
            yield
            ended = program.advance()

    def bound(self, bind: Bind) -> Program:
        """The program that a function binds."""
        if bind not in self.inner:
            self.inner[bind] = bind()
        return self.inner[bind]

    def test(self) -> bool:
        """Go on as far as possible. True at the end, after which the next test begins anew."""
        if self._active is None:
            self._active = self._run()
        try:
            for _ in self._active:
                return False
        except BaseException:
            self._active = None
            raise
        self._active = None
        return True

    def wait(self) -> None:
        self.is_waited_for = True
        try:
            self._channel.gpu.node_memory.wait_until(self.test)
        finally:
            self.is_waited_for = False


def meeting_program(steps: MeetingSteps, first: Sequence[Callable[[], object]], device: DeviceMemory) -> Program:
    """Program of a meeting. `first` runs before it."""
    return Program(
        call_rounds([*first, Wait(steps.wait, steps.test, lambda: "other ranks on GPUs")]),
        _MeetingWire(steps),
        stream=device,
    )


class _PeerCall(MeetingSteps):
    """Steps of a call that sends messages between GPUs if the arrays of all ranks are there, else stages."""

    def __init__(self, name: str, channel: GpuChannel, mark: int, on_device: Bind, on_host: Bind) -> None:
        super().__init__(channel)
        self._name, self._mark, self._on_device, self._on_host = name, mark, on_device, on_host

    def _run(self) -> Iterator[None]:
        mark = self._mark
        try:
            self.bound(self._on_device)
        except (RuntimeError, MemoryError):  # no room on the GPU: all ranks stage this call
            mark = ON_HOST
        yield from self._channel.meet(self._channel.new_post(mark))
        marks = {int(record["mark"]) for record in self._channel.records}
        if len(marks) > 1 and ON_HOST not in marks:
            raise different_calls(self._name)
        yield from self.run_inner(self._on_host if ON_HOST in marks else self._on_device)


def peer_program(
    name: str,
    channel: GpuChannel,
    mark: int,
    device: DeviceMemory,
    first: Sequence[Callable[[], object]],
    binds: tuple[Bind, Bind],
) -> Program:
    """Program of a call of the collective `name`. `binds` bind that between GPUs, and that for arrays on the host."""
    return meeting_program(_PeerCall(name, channel, mark, *binds), first, device)


def different_calls(collective: str) -> Mismatch:
    return Mismatch(
        MPI.ERR_TRUNCATE,
        f"{collective} of GPU arrays: expected the same call on all ranks, found different collectives, or another "
        f"count, dtype, operation or root; Communicator(..., debug=True) or CHORUS_DEBUG=1 names the calls",
    )
