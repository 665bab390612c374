"""Steps of a program that are local work: instructions, functions, and waits for pending work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collectives.engine.assembly import Instruction, Rounds, calling
from collectives.types import Wait


class PendingWork:
    """Function of a CALL that tests pending work, or waits for it if its program `blocks`."""

    blocks = False

    def __init__(self, work: Wait) -> None:
        self._work, self.awaits = work, work.awaits

    def __call__(self) -> bool:
        if self.blocks:
            self._work.wait()
        return self.blocks or bool(self._work.test())


Local = Instruction | Callable[[], object] | Wait
"""Local work: an instruction, a function, or pending work."""


def stepping(step: Local) -> Instruction:
    """Instruction of a step."""
    if isinstance(step, Instruction):
        return step
    return calling(PendingWork(step) if isinstance(step, Wait) else step)


def call_rounds(steps: Sequence[Local]) -> Rounds:
    """Rounds of a program that does these steps one after the other."""
    return [[list(map(stepping, steps))]]
