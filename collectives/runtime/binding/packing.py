"""Packed copies of buffers with gaps, made by instructions of a program, so that it can run on any memory."""

from __future__ import annotations

import numpy as np

from collectives.buffers.arguments import Buffer
from collectives.buffers.staging import PackedStaging
from collectives.engine.assembly import Instruction, MemoryOperand, OnMemories, Place, calling
from collectives.engine.instructions import RECEIVE_BUFFER, SEND_BUFFER, SOURCE, TARGET, Kind
from collectives.runtime.arguments.call import BYTE, staged
from collectives.runtime.execution.program import Local


def is_packed(buffer: Buffer) -> bool:
    """True for buffers with gaps on the host, of which programs at any place make packed copies."""
    return staged(buffer) and not buffer.device and buffer.address != 0


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
        runs, positions = staging.runs(), 0
        if runs is None:
            at = [(Place(user, 0), 1)]
            if staging.loading:
                self.first.append(calling(OnMemories(staging.loading_from, at, BYTE)))
            if staging.storing:
                self.last.append(calling(OnMemories(staging.storing_to, at, BYTE)))
            return staging.host
        pairs = []
        for start, nbytes in runs:
            pairs.append((nbytes, Place(user, start), Place(memory, positions)))
            positions += nbytes
        if staging.loading:
            self.first.append(Instruction(Kind.LOCAL, [MemoryOperand(n, of, out=to) for n, of, to in pairs]))
        if staging.storing:
            self.last.append(Instruction(Kind.LOCAL, [MemoryOperand(n, of, out=to) for n, to, of in pairs]))
        return staging.host
