"""Eager buffers: small calls are copied through memory of the program, which is cheaper than binding to addresses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from collectives.buffers import memory
from collectives.runtime.binding import buffer_spans, span
from collectives.runtime.call import Call
from collectives.runtime.program import Program
from collectives.runtime.progress import run_program
from collectives.transport import compiled_exchange

SLOT = 4096
"""Bytes up to which a blocking call uses eager buffers."""

COMPILED = 1 << 15
"""The same where frequent short calls are compiled: compiled calls use no eager buffers."""

SWAPPED = 1 << 18
"""The same for a single exchange, which runs between the user's arrays."""


def longest() -> int:
    """Bytes up to which calls use eager buffers."""
    return COMPILED if compiled_exchange.available() else SLOT


class EagerBuffers(NamedTuple):
    """A program and its buffers, copied into before it runs and out of after."""

    program: Program
    source: np.ndarray
    target: np.ndarray
    loads: bool
    stores: bool

    def run(self, call: Call) -> None:
        """Run the call through the buffers."""
        if self.loads and call.source is not None:
            self.source[:] = memory.view(call.source.address, self.source.size, call.unit)
        run_program(self.program)
        if self.stores and call.target is not None:
            memory.view(call.target.address, self.target.size, call.unit)[:] = self.target


def fits_eager_buffers(call: Call) -> bool:
    """True if the blocks are contiguous in both buffers and the call needs no other memory."""
    if max(buffer_spans(call)) * call.unit.itemsize > SWAPPED or call.separate_output or call.copy_input:
        return False
    sides = call.send_blocks, call.recv_blocks
    return all(sum(call.lengths[block] for block in blocks) == span(call, blocks) for blocks in sides)


def program_of(entry: Program | EagerBuffers) -> Program:
    return entry.program if isinstance(entry, EagerBuffers) else entry
