"""How a program of many ranks begins and ends: one voice for errors, one exit code, no rank left behind."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from mpi4py import MPI
from tqdm import tqdm

from benchlib import siblings

LAUNCHERS = ("mpiexec", "mpirun", "prte", "orte", "hydra")


class Parser(argparse.ArgumentParser):
    """An argument parser that only rank 0 hears, and that all ranks leave together."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if MPI.COMM_WORLD.Get_rank() == 0:
            super()._print_message(message, file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            self._print_message(message, sys.stderr)
        sys.stderr.flush()
        MPI.COMM_WORLD.Barrier()
        sys.exit(status)


def at_least(low: float, kind: type) -> Any:
    """A number that must not be smaller than `low`."""

    def number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {kind.__name__}") from None
        if not value >= low:
            raise argparse.ArgumentTypeError(f"{text} is below {low}")
        return value

    return number


def run(main: Callable[[], int]) -> NoReturn:
    """Run `main` as the whole program: its result is every rank's exit code.

    Ctrl-C ends the process at once and without a traceback, even inside a blocking MPI call. An exception on
    any rank is shown by that rank and ends all of them.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = main()
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        os._exit(141)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    sys.stdout.flush()
    MPI.COMM_WORLD.Barrier()
    siblings.part()
    sys.exit(code)


def leave(code: int) -> NoReturn:
    """End this process at once: where others may be dead, `MPI_Finalize` now and then waits for them in vain."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def speak_when(condition: Callable[[], bool]) -> None:
    """Let `say` print on the rank for which this holds, instead of rank 0."""
    global _speaks
    _speaks = condition


def _speaks() -> bool:
    return MPI.COMM_WORLD.Get_rank() == 0


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid > 1:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@cache
def watched(descriptor: int = 2) -> bool:
    """Whether a person sees standard error (or output, 1): it is a terminal here, or at the launcher."""
    if os.isatty(descriptor):
        return True
    try:
        for pid in _ancestors():
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:2]
            names = [os.path.basename(os.fsdecode(word)) for word in command]
            if any(name.startswith(LAUNCHERS) for name in names):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
                    return True
    except (OSError, IndexError, ValueError):
        pass
    return False


def progress(total: int, description: str, unit: str = "it") -> tqdm[Any]:
    """A progress bar on rank 0's standard error; silent on other ranks and where nobody watches."""
    hidden = MPI.COMM_WORLD.Get_rank() != 0 or not watched()
    look: dict[str, Any] = {"file": sys.stderr, "dynamic_ncols": True, "leave": False}
    return tqdm(total=total, desc=description, unit=unit, disable=hidden, **look)


def say(text: str = "") -> None:
    """Print one line on rank 0, above a progress bar if there is one."""
    if _speaks():
        # A launcher has a pipe each for output and errors and mixes lines and bar: on a terminal, use one.
        stream = sys.stderr if watched(1) and watched(2) else sys.stdout
        tqdm.write(text, file=stream)
        stream.flush()
