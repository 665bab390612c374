"""A call laid over its memory: the schedule, where its chunks lie, and what is done before and after its rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import buffers
from collectives.buffers import Buffer
from collectives.runtime.call import Blocks, Call, staged
from collectives.algorithms.catalog import blocks, build
from collectives.schedule.chunks import Layout, Place, even
from collectives.errors import InvalidArgument
from collectives.runtime.binder import SOURCE, TARGET, Combining, Memory, Program, Task, bind
from collectives.selection.timing_table import Choice
from collectives.runtime.ops import on_device
from collectives.schedule.topology import Nodes
from collectives.schedule.semantics import MEANINGS
from collectives.buffers.staging import Device, device_of, stage
from collectives.transport.wire import Wait, Wire

SEGMENT = 1 << 18
"""Bytes in which a long message that is to be combined travels: a few fit the second-level cache."""

LINE = 64
"""Bytes to whose multiples a vector is cut where it is long enough."""


def task(call: Call, choice: Choice, rank: int, size: int, nodes: Nodes | None = None) -> Task:
    """The schedule of the choice, laid over the call's memory."""
    schedule = build(call.collective, choice.algorithm, rank, size, call.root, choice.segments, nodes)
    itemsize = call.unit.itemsize
    memory = TARGET if call.source is call.target else SOURCE
    if MEANINGS[call.collective].vector:
        lengths = even(
            call.lengths[0], blocks(call.collective, choice.algorithm, size) * choice.segments, max(1, LINE // itemsize)
        )
        starts = dict(enumerate(Layout.packed(lengths).offsets))
        source = _places(memory, starts if call.brings else {}, lengths, 1)
        target = _places(TARGET, starts if call.takes else {}, lengths, 1)
    else:
        lengths = tuple(piece for length in call.lengths for piece in even(length, choice.segments))
        source = _places(memory, call.brings, lengths, choice.segments)
        target = _places(TARGET, call.takes, lengths, choice.segments)
    return Task(schedule, lengths, source, target, itemsize, SEGMENT if call.combine else 0)


def _places(memory: int, blocks: Blocks, lengths: tuple[int, ...], parts: int) -> dict[int, Place]:
    places = {}
    for block, start in blocks.items():
        for chunk in range(block * parts, (block + 1) * parts):
            places[chunk] = Place(memory, start, start + lengths[chunk])
            start += lengths[chunk]
    return places


class Ends(NamedTuple):
    """A call's two memories, and what must be done before and after the rounds."""

    source: Memory
    target: Memory
    first: list[Callable[[], object] | Wait]
    last: list[Callable[[], object] | Wait]
    keep: list[object]


def span(call: Call, blocks: Blocks) -> int:
    """Units from the beginning of a buffer to the end of its last block."""
    return max((start + call.lengths[block] for block, start in blocks.items() if call.lengths[block]), default=0)


def reaches(call: Call) -> tuple[int, int]:
    """Units that source and target reach; in place they are one memory that both share."""
    source, target = span(call, call.brings), span(call, call.takes)
    return (max(source, target),) * 2 if call.source is call.target else (source, target)


def changes_target(call: Call) -> bool:
    """Whether the call changes the target: the root of a broadcast has what it takes already."""
    untouched = call.source is call.target and call.combine is None and call.takes.keys() <= call.brings.keys()
    return bool(call.takes) and not untouched


def check_apart(call: Call) -> None:
    """Refuse a call whose two buffers overlap."""
    source, target = call.source, call.target
    if source is None or target is None or source is target or source.device != target.device:
        return
    if not (call.brings and call.takes and source.contiguous and target.contiguous):
        return
    ends = [span * call.unit.itemsize for span in reaches(call)]
    if all(ends) and source.address < target.address + ends[1] and target.address < source.address + ends[0]:
        raise InvalidArgument(MPI.ERR_BUFFER, "sendbuf and recvbuf overlap; to work in place pass MPI.IN_PLACE")


def ends_of(call: Call, device: Device | None) -> Ends:
    """The user's memory as the program sees it: itself on the device, if one is given."""
    first: list[Callable[[], object] | Wait] = []
    last: list[Callable[[], object] | Wait] = []
    keep: list[object] = []

    def memory(buffer: Buffer | None, span: int, load: bool, store: bool) -> Memory:
        if buffer is None:
            return Memory((device or np).empty(0, call.unit), 0)
        if device is not None:
            return Memory(device.view(buffer.address, span, call.unit), buffer.address)
        if not staged(buffer):
            return Memory(buffers.view(buffer.address, span, call.unit), buffer.address)
        staging = stage(buffer, load, store)
        keep.append(staging)
        first.extend(staging.loading)
        last.extend(staging.storing)
        array = staging.host.view(call.unit)
        return Memory(array, MPI.Get_address(staging.host))

    spans, stores = reaches(call), changes_target(call)
    if call.source is call.target:
        source = target = memory(call.target, spans[1], bool(call.brings), stores)
    elif call.snapshot:
        target = memory(call.target, spans[1], True, stores)
        source = Memory.allocate(spans[0], call.unit, device or np)
        copy = partial(source.array.__setitem__, slice(None), target.array[: spans[0]])
        first.append(copy if device is None else device.working(copy))
    else:
        source = memory(call.source, spans[0], bool(call.brings), False)
        target = memory(call.target, spans[1], False, stores)
    if call.moved >= 0:
        start, length = call.takes[call.moved], call.lengths[call.moved]
        home, wanted = target.array[start : start + length], target.array[:length]
        move = partial(wanted.__setitem__, slice(None), home) if device is None else partial(_move, wanted, home)
        last.insert(0, move)
    return Ends(source, target, first, last, keep)


def _move(target: Any, source: Any) -> None:
    target[...] = source.copy()  # they may overlap, which NumPy alone minds


def direct(call: Call) -> tuple[Call, Device] | None:
    """The call on the device that all of its memory lies on; None if there is none, or it cannot do its part."""
    ends = [buffer for buffer in (call.source, call.target) if buffer is not None]
    if not ends or not all(buffer.device and buffer.contiguous for buffer in ends):
        return None
    device, kernel = device_of(ends[0].owner), call.combine
    if not all(device.holds(buffer.owner) for buffer in ends[1:]):
        return None
    if kernel is not None:
        kernel = on_device(kernel, call.unit, device)
        if kernel is None:
            return None
    return call._replace(combine=kernel), device


def owners(call: Call) -> list[Any]:
    """The arrays that the user handed over."""
    return [buffer.owner for buffer in (call.source, call.target) if buffer is not None]


def bound(
    call: Call,
    choice: Choice,
    rank: int,
    size: int,
    wire: Wire,
    device: Device | None = None,
    first: Sequence[Callable[[], object]] = (),
    nodes: Nodes | None = None,
) -> Program:
    """The program of a call, on a device if one is given; `first` is done before all else."""
    ends = ends_of(call, device)
    program = bind(
        task(call, choice, rank, size, nodes),
        ends.source,
        ends.target,
        wire,
        combining(call),
        lane=device,
        first=[*first, *ends.first],
        last=ends.last,
    )
    program.keep(ends.keep)
    return program


class _Raw:
    """A reduction of elements that only MPI can describe, on arrays of as many raw bytes."""

    def __init__(self, combining: Combining) -> None:
        self._combining = combining

    def bind(self, left: Any, right: Any, out: Any) -> Callable[[], object]:
        return self._combining.bind(left.view(np.uint8), right.view(np.uint8), out.view(np.uint8))


def combining(call: Call) -> Combining | None:
    """The reduction, on arrays as the program has them."""
    if call.combine is not None and call.unit.type is np.void and call.unit.names is None:  # bfloat16 is of kind V too
        return _Raw(call.combine)
    return call.combine


def needs_staging(call: Call) -> bool:
    """Whether some of the data must be brought into dense host memory first."""
    return any(buffer is not None and staged(buffer) for buffer in (call.source, call.target))
