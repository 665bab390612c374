"""Builds the programs of calls of ranks that share a GPU, or have access to each other's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from collectives.buffers.device_memory import DeviceMemory
from collectives.runtime.arguments.call import Call, call_device
from collectives.runtime.arguments.ops import on_device as kernel_on_device
from collectives.runtime.binding import call_binding
from collectives.runtime.builders.communicator_transports import BLOCKING_CHANNEL
from collectives.runtime.builders.program_builder import ProgramBuilder
from collectives.runtime.execution.program import Program
from collectives.runtime.gpu.gpu_meeting import counted, peer_program
from collectives.runtime.gpu.gpu_program import gpu_program, suits_kernels, without_owners
from collectives.selection.timing_table import AlgorithmChoice, Form


class GpuProgramBuilder(ProgramBuilder):
    """`ProgramBuilder` whose programs begin with a meeting of ranks with arrays on GPUs. Others are counted."""

    def on_device(
        self, call: Call, choice: AlgorithmChoice, channel: int | None = BLOCKING_CHANNEL, any_algorithm: bool = False
    ) -> tuple[Call, DeviceMemory | None]:
        shared = self._transports.gpu_channel(channel)
        if shared is None:
            return super().on_device(call, choice, channel, any_algorithm)
        if shared.gpu.links is None:
            device = call_device(call) if any_algorithm and suits_kernels(call) else None
            if device is None or device.number != shared.gpu.device:
                return call, None
            return call, device if all(device.holds(buffer.owner) for buffer in call.buffers) else None
        _, device = super().on_device(call, choice, channel, any_algorithm)  # `bind` takes the device's reduction
        return call, device if device is not None and device.number == shared.gpu.device else None

    def _bind(
        self,
        call: Call,
        choice: AlgorithmChoice,
        form: Form,
        device: DeviceMemory | None = None,
        first: Sequence[Callable[[], object]] = (),
        channel: int | None = BLOCKING_CHANNEL,
        shared: bool = False,
    ) -> Program:
        bind, meetings = super()._bind, self._transports.gpu_channel(channel)
        if meetings is None:
            return bind(call, choice, form, device, first, channel, shared)
        if device is None:
            return counted(bind(call, choice, form, None, (), channel, shared), meetings)
        call = without_owners(call, device)  # programs outlive the arrays
        on_host = partial(bind, call, choice, form, None, (), channel, shared)
        mark = call_binding.call_mark(call, choice)
        if meetings.gpu.links is None:
            return gpu_program(call, meetings, mark, device, first, on_host)
        kernel = call.combine and kernel_on_device(call.combine, call.unit, device)
        on_device = partial(bind, call._replace(combine=kernel), choice, form, device, (), channel, shared)
        return peer_program(call.collective, meetings, mark, device, first, (on_device, on_host))

    def bind_any_length(
        self, call: Call, choice: AlgorithmChoice, form: Form, channel: int | None, short: bool
    ) -> Program | None:
        program, meetings = super().bind_any_length(call, choice, form, channel, short), None
        if program is not None:
            meetings = self._transports.gpu_channel(channel)
        return program if program is None or meetings is None else counted(program, meetings)
