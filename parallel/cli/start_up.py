"""Notices on standard error while ranks wait for others at the start of a program."""

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

PATIENCE = 20.0
"""Seconds until the first notice. Each further one comes at twice the time."""

MOST = 8
"""Ranks in a notice at most."""

TAG = 4711

LISTENER = """
command -v timeout >/dev/null || exit 0
timeout "$0" cat
[ $? -ne 124 ] || printf '%s\\n' "$1" >&2
"""
"""Shell program that prints a text unless its input ends before. MPI starts with Python's other threads stopped."""


def start_mpi(rank: int | None) -> list[str]:
    """Initialise MPI, and return the names of all ranks' nodes on rank 0. Collective.

    `rank` is given by the launcher's variables. If it is 0, a process of its own prints a notice after `PATIENCE`.
    Returns an empty list if MPI cannot be imported.
    """
    listener = None
    if rank == 0:
        text = f"rank 0 on {socket.gethostname()} has waited {PATIENCE:g} s for ranks that have not started MPI"
        command = ["sh", "-c", LISTENER, f"{PATIENCE:g}", text]
        with suppress(OSError):  # no shell: no notice
            listener = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        from mpi4py import MPI

        return MPI.COMM_WORLD.gather(MPI.Get_processor_name()) or []
    except (ImportError, RuntimeError):  # `collectives` raises it again, and names the cause
        return []
    finally:
        if listener is not None:
            listener.communicate()


def wait_for_all(nodes: Sequence[str]) -> None:
    """Wait until all ranks of MPI have come here. Rank 0 prints the missing ones, with their nodes. Collective."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.Get_rank():
        return world.Send(b"", 0, TAG)
    waiting = {rank: world.Irecv(bytearray(), rank, TAG) for rank in range(1, world.Get_size())}
    began = time.monotonic()
    patience = PATIENCE
    while waiting := {rank: request for rank, request in waiting.items() if not request.Test()}:
        time.sleep(0.001)
        if (spent := time.monotonic() - began) > patience:
            patience = 2 * spent
            print(f"after {spent:.0f} s rank 0 waits for {_listed([*waiting], nodes)}", file=sys.stderr, flush=True)


def _listed(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """Ranks with their nodes.

    >>> _listed([3, 5], ["a", "a", "b", "b", "c", "c"])
    'rank 3 on b, rank 5 on c'
    """
    more = f" and {len(ranks) - MOST} more" if len(ranks) > MOST else ""
    return ", ".join(f"rank {rank} on {nodes[rank]}" for rank in ranks[:MOST]) + more
