"""Program of all ranks of a launch: a random program in which the process of one rank ends.

``exits.py SEED HOW`` prints the time of the end, and of the errors of other ranks, by the clock of the node.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

from support.differential.cells import reports_of, settings_of
from support.differential.columns import COLUMNS
from support.differential.faults import set_fault
from support.differential.programs import EnginePlayer, engine_maker
from support.differential.random_programs import draw


def end(how: Callable[[int], Any]) -> Any:
    """End this process."""
    print(f"end {time.monotonic()}\n", end="", flush=True)
    return how(3)


ENDS: dict[str, Callable[[], Any]] = {
    "sys.exit": lambda: end(sys.exit),
    "os._exit": lambda: end(os._exit),
    "os._exit in a step": lambda: set_fault("forward", lambda text: end(os._exit)),
}
"""Ends of a rank, by name."""


def main(seed: int, how: str) -> None:
    """Run half of a program, the fault, and the whole program; exit with 1 after an error."""
    comm = MPI.COMM_WORLD
    row, task, column = draw(
        seed, [one for one in COLUMNS if one.ranks == comm.size and one.kind != "ps"], faulty=0.0
    ).cell
    make = engine_maker(task, row.optimizer, comm, settings_of(row, column))
    folder = Path(tempfile.gettempdir())
    try:
        with EnginePlayer(task, column, make, folder, reports_of(row, column)) as player:
            player.play(row.program[: len(row.program) // 2])
            comm.Barrier()
            if comm.rank == comm.size - 1:
                ENDS[how]()
            player.play(row.program)
    except Exception as error:
        print(f"error {time.monotonic()} {error}\n", end="", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
