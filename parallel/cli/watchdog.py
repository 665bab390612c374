"""All ranks of a node end together, as long as they need each other: a process beside each rank looks after that.

Open MPI with ``--with-ft ulfm`` lets ranks live when others die. That is of use to a program that knows how to go on.
Until it does, in `MPI_Init` or in a collective at the start, the others would wait for ever; and a program that never
does should end, as it would without the option. So whoever misses a rank of the node ends the launcher's daemon there,
and with it all ranks, wherever they are.

Needs Linux's /proc; elsewhere nobody looks. Imports no MPI: it is to look while MPI starts.
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
"""Seconds that a rank may be missed: all may be about to end, and some are faster."""

PERIOD = 0.1
"""Seconds from look to look."""

_beside: list[subprocess.Popen[bytes]] = []


def mortal() -> bool:
    """Whether this MPI lets ranks live when others die: that of Open MPI's ``mpiexec --with-ft ulfm``."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false")  # noqa: SIM112 (its name)


def need_each_other() -> None:
    """From now on, until `part` or the end of this process, the death of a rank of this node ends all."""
    count = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if mortal() and count.isdecimal() and not _beside:
        look = [sys.executable, "-I", __file__, str(os.getppid()), str(os.getpid()), count, str(GRACE)]
        with suppress(OSError):  # no process more can be had
            _beside.append(subprocess.Popen(look, stdin=subprocess.PIPE, start_new_session=True, env={}))


def part() -> None:
    """From now on this rank can do without others."""
    while _beside:
        process = _beside.pop()
        with suppress(BrokenPipeError):
            process.communicate()


def children(parent: int) -> set[int]:
    """The processes that a process has started and that live; none if it does not live itself."""
    try:
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except OSError:
        return set()
    return set(map(int, found.split()))


def look(launcher: int, rank: int, count: int, grace: float) -> None:
    """Look after the ranks that a launcher's daemon has started here, beside one of them, until its pipe ends."""
    all_of_them: set[int] = set()
    since = None
    while not select.select([0], [], [], PERIOD)[0]:
        here = children(launcher)
        if len(all_of_them) < count:
            all_of_them = here
        missing = all_of_them - here
        if not missing:
            since = None
        elif since is None:
            since = time.monotonic()
        elif not here:
            return
        elif time.monotonic() - since > (grace if rank == min(here) else 2 * grace):  # one speaks for all
            print(f"a rank has died (process {min(missing)}), and the others need it: all end", file=sys.stderr)
            with suppress(OSError):
                os.kill(launcher, signal.SIGTERM)
            return


if __name__ == "__main__":
    launcher, rank, count, grace = sys.argv[1:]
    look(int(launcher), int(rank), int(count), float(grace))
