"""Program of a call among ranks that share a GPU, in which the leader's kernel does all the work.

All ranks take the same steps: post where the buffers are, wait for the others' posts, launch (the leader) or wait for
the launch (the others). Buffers outside exported memory are copied through a workspace, in parts if it is too small. If
a rank's buffers are on the host, all ranks run the program for the host instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from collectives.buffers.arguments import Buffer
from collectives.buffers.device_memory import DeviceMemory
from collectives.runtime.arguments.call import BYTE, Blocks, Call
from collectives.runtime.arguments.ops import OP_NAMES
from collectives.runtime.execution.program import Program
from collectives.runtime.gpu.gpu_meeting import MeetingSteps, different_calls, meeting_program
from collectives.transport.gpu.exported_memory import ExportedBlock
from collectives.transport.gpu.gpu_channel import LEADER, ON_HOST, PATIENCE, GpuChannel, Post, set_place
from collectives.transport.gpu.gpu_kernels import (
    EXCLUSIVE,
    INCLUSIVE,
    NOTHING,
    TOTAL,
    Copied,
    KernelLaunch,
    Reduced,
    ReductionType,
    reduction_type,
)

WORKSPACE = 1 << 25
"""Most bytes of a workspace for each of the two buffers of a call."""

ALIGNMENT = 256
"""Bytes that parts of a block are multiples of."""

WAYS = {"scan": INCLUSIVE, "exscan": EXCLUSIVE}


def kernel_form(call: Call) -> ReductionType | None:
    """Form of the call's reduction in the kernel. None if it has none, or the call does not reduce."""
    return reduction_type(OP_NAMES.get(call.op, ""), call.unit) if call.combine is not None else None


def suits_kernels(call: Call) -> bool:
    """True if the kernels can run a call on device memory, whose blocks all have known lengths."""
    if call.neighbors is not None or call.typed:
        return False
    dense = bool(call.buffers) and all(buffer.device and buffer.contiguous for buffer in call.buffers)
    return dense and (call.combine is None or kernel_form(call) is not None)


def in_part(start: int, length: int, part: int, parts: int, unit: int) -> tuple[int, int]:
    """Offset and length of one of `parts` parts of a block, in bytes. Only the last ones may be shorter, or empty.

    >>> [in_part(0, 1000, part, 3, 4) for part in range(3)]
    [(0, 512), (512, 488), (1000, 0)]
    """
    grain = np.lcm(ALIGNMENT, unit) if parts > 1 else 1
    each = int(-(-length // (parts * grain)) * grain)
    low, high = min(length, part * each), min(length, (part + 1) * each)
    return start + low, high - low


def gpu_program(
    call: Call,
    channel: GpuChannel,
    mark: int,
    device: DeviceMemory,
    first: Sequence[Callable[[], object]],
    on_host: Callable[[], Program],
) -> Program:
    """Program of a call that suits the kernels. `on_host` binds the program for ranks of which some are on the host."""
    steps = _GpuCall(call, channel, mark, device, on_host)
    return meeting_program(steps, first, device)


def without_owners(call: Call, device: DeviceMemory) -> Call:
    """Copy of a call on the device that does not keep the user's arrays: views of the first byte take their place."""
    views = {id(one): replace(one, owner=device.view(one.address, min(one.nbytes, 1), BYTE)) for one in call.buffers}
    source, target = (None if one is None else views[id(one)] for one in (call.source, call.target))
    return call._replace(source=source, target=target)


class _Piece(NamedTuple):
    """Part of a block: its address in the user's memory, its offset in exported memory, and its bytes."""

    block: int
    address: int
    offset: int
    nbytes: int


class _End:
    """Source or target of a call, in exported memory, or in a workspace if it is to be kept `apart` or is elsewhere."""

    def __init__(self, call: Call, channel: GpuChannel, name: str, buffer: Buffer | None, blocks: Blocks, apart: bool):
        self._channel, self._name, self.unit = channel, name, call.unit.itemsize
        self._address = 0 if buffer is None else buffer.address
        self._blocks = {block: (start * self.unit, call.lengths[block] * self.unit) for block, start in blocks.items()}
        self._span, self._apart = max(map(sum, self._blocks.values()), default=0), apart
        self.locate()

    def locate(self) -> None:
        """Find out if the buffer is in exported memory. Else it is `staged`, in so many `parts`."""
        self._found = self._channel.gpu.exported.find(self._address, self._span)
        self.staged = self._span > 0 and (self._apart or self._found is None)
        nbytes = sum(length for _, length in self._blocks.values()) if self.staged else 0
        self.parts = max(1, -(-nbytes // WORKSPACE))

    def pieces(self, part: int, parts: int) -> list[_Piece]:
        """Parts of the blocks, one after the other in a workspace."""
        pieces, packed = [], 0
        base = 0 if self._found is None else self._found.offset
        for block, place in self._blocks.items():
            start, length = in_part(*place, part, parts, self.unit)
            pieces.append(_Piece(block, self._address + start, packed if self.staged else base + start, length))
            packed += length
        return pieces

    def workspace(self, pieces: Sequence[_Piece]) -> ExportedBlock:
        return self._channel.workspace(self._name, sum(piece.nbytes for piece in pieces))

    def reserve(self) -> None:
        """Allocate the workspace. RuntimeError or MemoryError if there is none."""
        if self.staged:
            self.workspace(self.pieces(0, self.parts))

    def write(self, record: np.ndarray, pieces: Sequence[_Piece]) -> None:
        """Write to a record where these pieces are."""
        handle = self.workspace(pieces).handle if self.staged else b"" if self._found is None else self._found.handle
        rows = [(piece.block, piece.offset, piece.nbytes // self.unit) for piece in pieces]
        set_place(record, self._name, handle, rows)

    def copies(self, pieces: Sequence[_Piece], to_user: bool) -> list[KernelLaunch]:
        """Copies between the user's memory and the workspace, if it is used."""
        if not self.staged:
            return []
        here = self.workspace(pieces).address
        ends = [(piece.address, here + piece.offset, piece.nbytes) for piece in pieces]
        kernels = self._channel.gpu.kernels
        return kernels.copies(
            [Copied(there, user, n) if to_user else Copied(user, there, n) for user, there, n in ends]
        )


class _GpuCall(MeetingSteps):
    """Steps of a call whose buffers are on the device."""

    def __init__(
        self, call: Call, channel: GpuChannel, mark: int, device: DeviceMemory, on_host: Callable[[], Program]
    ) -> None:
        super().__init__(channel)
        self._call, self._mark, self._device, self._bind_on_host = call, mark, device, on_host
        self._gpu, self._form = channel.gpu, kernel_form(call)
        source = call.target if call.copy_input else call.source
        self._source = _End(call, channel, "source", source, call.send_blocks, call.copy_input)
        self._target = _End(call, channel, "target", call.target, call.recv_blocks, call.separate_output)
        self._located = -1  # changes of exported memory up to which this is known
        self._staged, self._parts = False, 1
        self._post: Post | None = None
        self._planned, self._puts = list[int](), list[Callable[[int], object]]()
        """Functions that put the kernels for the records of these versions on a stream."""

    def _locate(self) -> None:
        """Find out where the buffers are, anew if exported memory has changed."""
        if self._located == self._gpu.exported.changes:
            return
        self._source.locate()
        self._target.locate()
        self._located, self._post = self._gpu.exported.changes, None
        self._staged = self._source.staged or self._target.staged
        self._parts = max(self._source.parts, self._target.parts)

    def _run(self) -> Iterator[None]:
        self._locate()
        channel, post, waits = self._channel, self._post, False
        if post is None:
            try:
                self._source.reserve()
                self._target.reserve()
            except (RuntimeError, MemoryError):  # no room on the GPU: all ranks stage this call
                post = channel.new_post(ON_HOST)
            else:
                post = channel.new_post(self._mark, self._parts) if self._parts > 1 else self._load(0, 1)
        if self._parts == 1 and self._gpu.rank != LEADER:
            waits = yield from self._needs_event()
        yield from channel.meet(post, waits)
        versions, parts = channel.versions, 1
        if not self._is_planned(versions):
            records = channel.records
            if any(record["mark"] == ON_HOST for record in records):
                yield from self._run_on_host()
                return
            parts = max(int(record["parts"]) for record in records)
        for part in range(parts):
            if parts > 1:
                post = self._load(part, parts)
                waits = self._gpu.rank != LEADER and (yield from self._needs_event())
                yield from channel.meet(post, waits)
                versions = channel.versions
            yield from self._launch(versions)
            if self._staged:
                self._put(self._target.copies(self._target.pieces(part, parts), to_user=True))
                self._device.record(channel.unused)
        self._device.join()

    def _run_on_host(self) -> Iterator[None]:
        yield from self.run_inner(self._bind_on_host)

    def _is_planned(self, versions: list[int]) -> bool:
        return versions == self._planned or [abs(version) for version in versions] == self._planned

    def _put(self, launches: Sequence[KernelLaunch]) -> None:
        """Put kernels on the call's stream."""
        self._device.launch([launch.put for launch in launches])

    def _load(self, part: int, parts: int) -> Post:
        """Copy staged input. Return the post of a part, which is kept for later calls if nothing is staged."""
        post = self._channel.new_post(self._mark)
        if self._staged:
            self._device.wait_for(self._channel.unused.ptr)
        for end in (self._source, self._target):
            pieces = end.pieces(part, parts)
            end.write(post.record, pieces)
            if end is self._source:
                self._put(end.copies(pieces, to_user=False))
        if not self._staged and parts == 1:
            self._post = post
        return post

    def _needs_event(self) -> Generator[None, None, bool]:
        """Record an event for the leader unless the stream is soon idle. Return whether it was recorded."""
        device = self._device
        if self._gpu.default_sees_all and (device.is_idle or (yield from self._soon(lambda: device.is_idle))):
            return False
        self._device.record(self._channel.event)
        return True

    def _soon(self, test: Callable[[], bool]) -> Generator[None, None, bool]:
        """Iterate until `test` is true, in a blocking call for at most `PATIENCE` seconds. Return whether it is."""
        deadline, found = time.perf_counter() + PATIENCE, test()
        while not found and self.is_waited_for and time.perf_counter() < deadline:
            yield
            found = test()
        return found

    def _launch(self, versions: list[int]) -> Iterator[None]:
        """Run the kernels behind the work of all ranks, on the leader. Elsewhere wait for them, or let streams wait."""
        channel, exported = self._channel, self._gpu.exported
        if not self._is_planned(versions):
            self._puts = [launch.put for launch in self._plan(channel.records)]
            self._planned = [abs(version) for version in versions]
        if self._gpu.rank == LEADER:
            for rank, version in enumerate(versions):
                if version < 0:  # its stream may be busy: it has recorded an event
                    self._device.wait_for(channel.event_of(rank))
            self._device.launch(self._puts, channel.event)
            channel.show_launch()
            return
        while not channel.is_launched():
            if self._gpu.watch.is_due:
                self._gpu.watch.check([LEADER])
            yield
        event = channel.event_of(LEADER)
        if not (exported.is_reached(event) or (yield from self._soon(lambda: exported.is_reached(event)))):
            self._device.wait_for(event)

    # -------------------------------------------------------------------------------- what the kernels do

    def _plan(self, records: Sequence[np.ndarray]) -> list[KernelLaunch]:
        """Launches for these records, on the leader. Mismatch on all ranks if the records are of different calls."""
        if len({int(record["mark"]) for record in records}) > 1:
            raise different_calls(self._call.collective)
        sent, received = ([_rows(record[end]) for record in records] for end in ("sent", "received"))
        holders = {block: (rank, *row) for rank, rows in enumerate(sent) for block, row in rows.items()}
        for rows in received:
            for block, (_, count) in rows.items():
                if block not in holders or holders[block][2] != count:
                    raise different_calls(self._call.collective)
        if self._gpu.rank != LEADER:  # after the checks, so that all ranks raise
            return []
        sources, targets = ([self._address(record, end) for record in records] for end in ("source", "target"))
        if self._form is not None:
            return self._reductions(self._form, sent, received, sources, targets)
        unit = self._call.unit.itemsize
        return self._gpu.kernels.copies(
            [
                Copied(sources[holders[block][0]] + holders[block][1], targets[rank] + start, count * unit)
                for rank, rows in enumerate(received)
                for block, (start, count) in rows.items()
            ]
        )

    def _address(self, record: np.ndarray, end: str) -> int:
        """Address on the leader of a rank's source or target."""
        handle = record[end].tobytes()
        own = [block.address for block in self._gpu.exported.blocks if block.handle == handle]
        return own[0] if own else self._gpu.exported.open(handle) if any(handle) else 0

    def _reductions(
        self,
        form: ReductionType,
        sent: Sequence[dict[int, tuple[int, int]]],
        received: Sequence[dict[int, tuple[int, int]]],
        sources: Sequence[int],
        targets: Sequence[int],
    ) -> list[KernelLaunch]:
        """One launch for all blocks if they are one vector on every rank, else one for each block."""
        size, way = self._call.unit.itemsize, WAYS.get(self._call.collective, TOTAL)
        blocks = sorted(sent[LEADER])
        runs: list[list[int]] = []
        for block in blocks:
            if runs and all(_ends(rows[runs[-1][-1]], size) == rows[block][0] for rows in sent):
                runs[-1].append(block)
            else:
                runs.append([block])
        launches: list[KernelLaunch] = []
        for run in runs:
            first, count = {}, 0
            for block in run:
                first[block] = count
                count += sent[LEADER][block][1]
            outputs = [NOTHING] * len(sent)
            for rank, rows in enumerate(received):
                for block in rows.keys() & first.keys():
                    start, length = rows[block]
                    outputs[rank] = Reduced(targets[rank] + start, first[block], first[block] + length)
            inputs = [source + rows[run[0]][0] for source, rows in zip(sources, sent, strict=True)]
            launches += self._gpu.kernels.reduction(form, inputs, count, outputs, way)
        return launches


def _rows(rows: np.ndarray) -> dict[int, tuple[int, int]]:
    """Offset in bytes and count of units of each block in a record."""
    return {block: (start, count) for block, start, count in rows.tolist() if block >= 0}


def _ends(row: tuple[int, int], size: int) -> int:
    return row[0] + row[1] * size
