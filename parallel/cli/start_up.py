"""Notices on standard error at the start of a program: of ranks that wait for others, and of compilation."""

import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

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


def compilation_notice(environment: Mapping[str, str]) -> str:
    """Text for a training on GPUs whose kernels CuPy has not compiled before. Empty if it finds some in its cache.

    >>> compilation_notice({"CUPY_CACHE_DIR": "/nonexistent"})
    'kernels of the GPU are compiled at their first use, once (kept in /nonexistent): the first steps take longer'
    """
    folder = Path(environment.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    in_memory = environment.get("CUPY_CACHE_IN_MEMORY", "0") != "0"
    if not in_memory and folder.is_dir() and next(folder.iterdir(), None) is not None:
        return ""
    kept = "in each run, as CUPY_CACHE_IN_MEMORY is set" if in_memory else f"once (kept in {folder})"
    return f"kernels of the GPU are compiled at their first use, {kept}: the first steps take longer"


def _listed(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """Ranks with their nodes.

    >>> _listed([3, 5], ["a", "a", "b", "b", "c", "c"])
    'rank 3 on b, rank 5 on c'
    """
    more = f" and {len(ranks) - MOST} more" if len(ranks) > MOST else ""
    return ", ".join(f"rank {rank} on {nodes[rank]}" for rank in ranks[:MOST]) + more
