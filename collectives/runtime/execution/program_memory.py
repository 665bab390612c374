"""Memories of a program, and what a program is to do with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from collectives.buffers.layouts import BufferRows
from collectives.engine.instructions import LINE, SCALE
from collectives.schedule.chunks import MemorySpan
from collectives.schedule.steps import Schedule
from collectives.transport.wire import Wire

NO_ROWS: Mapping[int, BufferRows] = MappingProxyType({})


class Task(NamedTuple):
    """One rank's part of a call: its schedule, and lengths and locations of chunks, before binding to memory.

    `source` and `target` are the initial locations of the rank's chunks and the final locations of its results.
    Messages longer than `segment` bytes, the same on all ranks, are cut, so that one segment is reduced while the next
    arrives, and few are in the network at once; 0: never cut. In a memory with `rows`, spans are of the packed
    data, of which rows lie apart.
    """

    schedule: Schedule
    lengths: Sequence[int]
    source: Mapping[int, MemorySpan]
    target: Mapping[int, MemorySpan]
    itemsize: int
    segment: int = 0
    rows: Mapping[int, BufferRows] = NO_ROWS


class Scale(NamedTuple):
    """Lengths of a program for any length, and what its engine needs to set them.

    Attributes
    ----------
    least, most : elements of the shortest and longest call, in a vector or in each block
    record, order : arguments of the engine's `scale`
    blocks : number of blocks in source and target of a program for any counts, `most` in bytes
    total : bytes of all blocks together at most
    """

    least: int
    most: int
    record: np.ndarray
    order: np.ndarray
    blocks: tuple[int, int] | None = None
    total: int = 0

    @staticmethod
    def record_of(wire: Wire, held: Sequence[Sequence[int]], **values: Any) -> np.ndarray:
        """`record` of a program with these messages, and with these chunks in its memories."""
        record = np.zeros(1, SCALE)
        values["cell_bytes"], values["part"] = wire.cell_bytes, wire.part_bytes
        values["streamed"] = wire.streamed if wire.node is not None and wire.node.reads else 1 << 62
        values["starts"] = np.cumsum([0, *map(len, held)])
        for name, value in values.items():
            record[name] = value
        return record


class ElementArray(NamedTuple):
    """A 1-D array, on the host or a device, and its memory address."""

    array: Any
    address: int

    @classmethod
    def allocate(cls, count: int, dtype: Any, xp: Any = np) -> ElementArray:
        array = xp.empty(count, dtype)
        return cls(array, _address(array))


SHARED_SCRATCH = 1 << 25
"""Most bytes that programs share as scratch memory."""


class ScratchMemory:
    """Scratch memory of host programs of which only one runs at a time, as those of blocking calls: all use the same.

    A program that needs more than `SHARED_SCRATCH` has memory of its own.
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def arrays(self, counts: Sequence[int], dtype: np.dtype[Any]) -> tuple[list[ElementArray], int]:
        """Arrays of so many elements, apart from each other, and the bytes that no other program uses."""
        sizes = [count * dtype.itemsize for count in counts]
        ends = list(accumulate(size + -size % LINE for size in sizes))
        if ends[-1] > SHARED_SCRATCH:
            return [ElementArray.allocate(count, dtype) for count in counts], sum(sizes)
        if ends[-1] > len(self._bytes):  # programs that exist keep the smaller one
            self._bytes = np.empty(min(max(ends[-1], 2 * len(self._bytes)), SHARED_SCRATCH) + LINE, np.uint8)
            skipped = -_address(self._bytes) % LINE
            self._bytes = self._bytes[skipped : len(self._bytes) - LINE + skipped]
        arrays = [self._bytes[end - size - -size % LINE :][:size].view(dtype) for end, size in zip(ends, sizes)]
        return [ElementArray(array, _address(array)) for array in arrays], 0


def _address(array: Any) -> int:
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(array.__cuda_array_interface__["data"][0])
