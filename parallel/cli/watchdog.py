"""A process beside each rank that ends all ranks of the node when one of them dies.

Open MPI with ``--with-ft ulfm`` keeps ranks alive when others die. A program that handles deaths wants that; until it
does (in `MPI_Init`, in a first collective), or if it never does, the others would wait forever. So the process that
misses a rank of its node terminates the launcher's daemon there, and with it all ranks everywhere.

Needs Linux's /proc; does nothing elsewhere. Imports no MPI, since it has to watch while MPI starts.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

GRACE = 3.0
"""Seconds that a rank may be missing: at a normal end, some ranks exit earlier than others."""

PERIOD = 0.1
"""Seconds between two checks."""

_beside: list[subprocess.Popen[bytes]] = []


def fault_tolerant() -> bool:
    """True if this MPI keeps ranks alive when others die (Open MPI's ``mpiexec --with-ft ulfm``)."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false")  # noqa: SIM112 (its name)


def start() -> None:
    """Until `stop` or the end of this process, let the death of a rank of this node end all ranks."""
    count = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if fault_tolerant() and count.isdecimal() and not _beside:
        command = [sys.executable, "-I", __file__, str(os.getppid()), str(os.getpid()), count, str(GRACE)]
        with suppress(OSError):  # no more processes
            _beside.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env={}))


def stop() -> None:
    """Watch no more: this rank handles the deaths of others."""
    while _beside:
        process = _beside.pop()
        with suppress(BrokenPipeError):
            process.communicate()


def children(parent: int) -> set[int]:
    """Living child processes of a process; empty if it has ended."""
    try:
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except OSError:
        return set()
    return set(map(int, found.split()))


def watch(launcher: int, rank: int, count: int, grace: float) -> None:
    """Watch the ranks that a launcher's daemon has started here, until standard input ends."""
    ranks: set[int] = set()
    since = None
    while not select.select([0], [], [], PERIOD)[0]:
        here = children(launcher)
        if len(ranks) < count:
            ranks = here
        missing = ranks - here
        if not missing:
            since = None
        elif since is None:
            since = time.monotonic()
        elif not here:
            return
        elif time.monotonic() - since > (grace if rank == min(here) else 2 * grace):  # one process acts for all
            print(f"a rank has died (process {min(missing)}), and the others need it: all end", file=sys.stderr)
            with suppress(OSError):
                os.kill(launcher, signal.SIGTERM)
            return


if __name__ == "__main__":
    launcher, rank, count, grace = sys.argv[1:]
    watch(int(launcher), int(rank), int(count), float(grace))
