"""Watchdog process of each rank. It ends all ranks of the job when a rank of its node dies.

Open MPI with ``--with-ft ulfm`` keeps ranks alive when others die. Until the program handles deaths, they would wait
forever (in `MPI_Init`, in a first collective). The watchdog terminates the launcher's daemon, and with it all ranks.
Needs Linux's /proc. Does nothing elsewhere. Imports no MPI, since it watches while MPI starts.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

GRACE = 3.0  # seconds that a rank may be missing: at a normal end, some ranks exit earlier than others
PERIOD = 0.1  # seconds between two checks

_processes: list[subprocess.Popen[bytes]] = []


def fault_tolerant() -> bool:
    """True if MPI keeps ranks alive when other ranks die (Open MPI's ``mpiexec --with-ft ulfm``)."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false")  # noqa: SIM112 (its name)


def start() -> None:
    """Start the watchdog if MPI is fault-tolerant: until `stop`, the death of a rank on this node ends all ranks."""
    count = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if fault_tolerant() and count.isdecimal() and not _processes:
        command = [sys.executable, "-I", __file__, str(os.getppid()), str(os.getpid()), count, str(GRACE)]
        with suppress(OSError):  # no more processes
            _processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env={}))


def stop() -> None:
    """Stop the watchdog of this rank. From now on the program handles dead ranks itself."""
    while _processes:
        process = _processes.pop()
        with suppress(BrokenPipeError):
            process.communicate()


def children(parent: int) -> set[int]:
    """Process ids of the living children of a process. Empty if it has ended."""
    try:
        return set(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))
    except OSError:
        return set()


def watch(launcher: int, rank: int, count: int, grace: float) -> None:
    """Watchdog loop: terminate process `launcher` if one of its `count` children dies. `rank` is our rank's pid."""
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
