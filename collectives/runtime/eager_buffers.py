"""Small calls pass through memory of the program's own: copying a few bytes costs less than binding to addresses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from collectives import buffers
from collectives.runtime.binding import reaches, span
from collectives.runtime.call import Call
from collectives.runtime.binder import Program
from collectives.runtime.requests import drive
from collectives.transport import compiled_exchange as compiled

SLOT = 4096
"""Bytes up to which a blocking call passes through slots."""

COMPILED = 1 << 15
"""The same where short calls are compiled once they are made often: then nothing passes through slots."""

SWAPPED = 1 << 18
"""The same, of a call that only swaps a message for a message: it goes straight between the user's arrays."""


def longest() -> int:
    """Bytes up to which calls pass through slots here."""
    return COMPILED if compiled.available() else SLOT


class Slots(NamedTuple):
    """A program on memory of its own, to copy into before it runs and out of after."""

    program: Program
    source: np.ndarray
    target: np.ndarray
    loads: bool
    stores: bool

    def run(self, call: Call) -> None:
        """Do the call through the slots."""
        if self.loads and call.source is not None:
            self.source[:] = buffers.view(call.source.address, self.source.size, call.unit)
        drive(self.program)
        if self.stores and call.target is not None:
            buffers.view(call.target.address, self.target.size, call.unit)[:] = self.target


def suits(call: Call) -> bool:
    """Whether its blocks lie without gaps, and where they are wanted; in place there is one slot for both ends."""
    if max(reaches(call)) * call.unit.itemsize > SWAPPED or call.moved >= 0 or call.snapshot:
        return False
    sides = call.brings, call.takes
    return all(sum(call.lengths[block] for block in blocks) == span(call, blocks) for blocks in sides)


def program_of(kept: Program | Slots) -> Program:
    """What runs."""
    return kept.program if isinstance(kept, Slots) else kept
