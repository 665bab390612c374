"""Instructions of a program's local work: copies and reductions in its memories, by the engine or on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.buffers.device_memory import DeviceMemory
from collectives.engine.assembly import Instruction, MemoryOperand, OnMemories, Place, calling
from collectives.engine.extension import reduction_number
from collectives.engine.instructions import COPY, SCRATCH, Kind
from collectives.runtime.arguments.ops import Combiner
from collectives.runtime.execution.program_memory import ElementArray, ScratchMemory
from collectives.schedule.chunks import MemorySpan
from collectives.schedule.chunks import aligned as aligned_spans
from collectives.schedule.steps import Side
from collectives.transport.wire import Combining, Piece


class LocalWork:
    """Memories of a program, and instructions of local work on them: by the engine, or on a device `stream`."""

    def __init__(
        self,
        memories: list[ElementArray],
        itemsize: int,
        kernel: Combiner | None,
        stream: DeviceMemory | None,
    ) -> None:
        self.memories, self.itemsize, self.stream, self.nbytes = memories, itemsize, stream, 0
        self._kernel, self._dtype, self._reduction = kernel, memories[0].array.dtype, COPY
        if kernel is not None and kernel.function is not None and stream is None:
            self._reduction = reduction_number(kernel.function, kernel.ufunc, self._dtype)
        self.lands = stream is not None or (kernel is not None and self._reduction == COPY)
        """Incoming operands land in memory of this rank before they are reduced: the engine cannot reduce them."""

    def allocate(self, lengths: Sequence[int], place: DeviceMemory | ScratchMemory | None) -> None:
        """Let scratch and landing memory of so many elements be the last memories of the program."""
        if isinstance(place, ScratchMemory):
            more, self.nbytes = place.arrays(lengths, self._dtype)
        else:
            more = [ElementArray.allocate(count, self._dtype, place or np) for count in lengths]
            self.nbytes = sum(lengths) * self.itemsize
        self.memories = [*self.memories[:SCRATCH], *more]

    def place(self, span: MemorySpan) -> Place:
        """Memory of a span, and the byte at which the span begins in it."""
        return Place(span.memory, span.start * self.itemsize)

    def piece(self, span: MemorySpan) -> Piece:
        """A span as a piece of a message."""
        address = self.memories[span.memory].address + span.start * self.itemsize
        return Piece((span.stop - span.start) * self.itemsize, self.place(span), address)

    def _array(self, span: MemorySpan) -> Any:
        return self.memories[span.memory].array[span.start : span.stop]

    def on_stream(self, call: Callable[[], object]) -> Instruction:
        """Instruction that starts work on the device stream."""
        assert self.stream is not None, "local work is on a device"
        return calling(self.stream.working(call))

    def copies(self, sources: Iterable[MemorySpan], destinations: Iterable[MemorySpan]) -> list[Instruction]:
        """Copies between spans of equal total length, but not of memory onto itself."""
        rows = [row for row in aligned_spans(sources, destinations) if self.piece(row[0]) != self.piece(row[1])]
        if self.stream is not None:
            return [self.on_stream(partial(copy_array, self._array(to), self._array(of))) for of, to in rows]
        operands = [MemoryOperand(self.piece(of).nbytes, self.place(of), out=self.place(to)) for of, to in rows]
        return [Instruction(Kind.LOCAL, operands)] if operands else []

    def combining(self, side: Side) -> Combining:
        """Reduction of incoming data, the operand on `side`, by the engine."""
        self._check()
        return Combining(self._reduction, side == "right")

    def reductions(self, rows: Iterable[tuple[MemorySpan, ...]], side: Side) -> list[Instruction]:
        """Reductions of rows (incoming operand, on `side`; own operand; result)."""
        kernel = self._check()
        ordered = [(mine, of, to) if side == "right" else (of, mine, to) for of, mine, to in rows]
        if self.stream is not None:
            return [self.on_stream(kernel.bind(*map(self._array, row))) for row in ordered]
        if self._reduction == COPY:  # the engine has no number for the operation
            ranges = [[(self.place(span), self.piece(span).nbytes) for span in row] for row in ordered]
            return [calling(OnMemories(kernel.bind, each, self._dtype)) for each in ranges]
        operands = [MemoryOperand(self.piece(row[0]).nbytes, *map(self.place, row)) for row in ordered]
        return [Instruction(Kind.LOCAL, operands, reduction=self._reduction)] if operands else []

    def _check(self) -> Combiner:
        if self._kernel is None:
            raise ValueError("the schedule combines, but no operation was given")
        return self._kernel


def copy_array(destination: Any, source: Any) -> None:
    destination[...] = source
