"""Packed copies of buffers with gaps, made by instructions of a program, so that it can run on any memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from collectives.buffers.arguments import Buffer
from collectives.buffers.datatypes import Identity
from collectives.buffers.layouts import BufferRows, rows_of
from collectives.buffers.staging import PackedStaging
from collectives.engine.assembly import Instruction, MemoryOperand, OnMemories, Place, calling
from collectives.engine.instructions import RECEIVE_BUFFER, SEND_BUFFER, SOURCE, TARGET, Kind
from collectives.runtime.arguments.call import BYTE, Call, staged
from collectives.runtime.execution.local_steps import Local


def needs_packing(buffer: Buffer) -> bool:
    """True for buffers with gaps on the host. Programs for any address make packed copies of them."""
    return staged(buffer) and not buffer.device and buffer.address != 0


LONG_ROW, SHORT_ROW = 1 << 11, 1 << 6
"""Mean bytes of rows that messages leave from and go to directly, and the same of those with a datatype a block."""

MOST_RUNS = 1024
"""Most runs of bytes of a buffer that are packed one by one. The MPI packs others."""

MOST_LAYOUTS = 256

_layouts: dict[tuple[Any, ...], BufferRows | None] = {}


def rows_in_place(call: Call, buffer: Buffer) -> BufferRows | None:
    """Rows of a buffer with gaps that messages of the call leave from and go to without a packed copy. None if none do.

    The rows of a datatype for each block are cut to parts of a bounce buffer. Of others the peer may read each by a
    system call.
    """
    if not needs_packing(buffer) or call.combine is not None or call.copy_input:
        return None
    rows = _known_rows(buffer)
    return rows if rows is not None and rows.mean_bytes >= (SHORT_ROW if call.typed else LONG_ROW) else None


def _known_rows(buffer: Buffer) -> BufferRows | None:
    key = Identity(buffer.datatype), buffer.count, buffer.counts, buffer.displs
    if key not in _layouts:
        while len(_layouts) >= MOST_LAYOUTS:
            _layouts.pop(next(iter(_layouts)), None)
        _layouts[key] = rows_of(buffer)
    return _layouts[key]


class Packing:
    """Packed copies of a call's buffers on the host that are not contiguous, as its program's source and target.

    `places`: memories of the user's send and receive buffer, which may be others in each run.
    """

    def __init__(self) -> None:
        self.places = [SOURCE, TARGET]
        self.first: list[Local] = []
        self.last: list[Local] = []

    def copy_of(self, buffer: Buffer, memory: int, load: bool, store: bool) -> np.ndarray:
        """Packed copy, in the program's `memory`, of a buffer."""
        staging, user = PackedStaging(buffer, load, store), SEND_BUFFER if memory == SOURCE else RECEIVE_BUFFER
        self.places[memory] = user
        rows = _known_rows(buffer)
        if rows is None or len(rows.offsets) > MOST_RUNS:
            at = [(Place(user, 0), 1)]  # of any length: only the address is used
            if staging.loading:
                self.first.append(calling(OnMemories(staging.loading_from, at, BYTE)))
            if staging.storing:
                self.last.append(calling(OnMemories(staging.storing_to, at, BYTE)))
            return staging.host
        ends = zip(pairwise(rows.starts), rows.offsets)
        pairs = [(stop - start, Place(user, at), Place(memory, start)) for (start, stop), at in ends]
        if staging.loading:
            self.first.append(Instruction(Kind.LOCAL, [MemoryOperand(n, of, out=to) for n, of, to in pairs]))
        if staging.storing:
            self.last.append(Instruction(Kind.LOCAL, [MemoryOperand(n, of, out=to) for n, to, of in pairs]))
        return staging.host
