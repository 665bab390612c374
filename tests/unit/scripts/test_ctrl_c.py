"""Ctrl-C at any moment ends a run on all ranks, with a thread in collectives too, and leaves no process."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from mpi_launches import ROOT
from support.launches import MPIEXEC, is_alive, needs_mpiexec
from support.tiers import default

pytestmark = [needs_mpiexec, pytest.mark.timeout(300)]

PROGRAM = """
import faulthandler, os, signal, sys, threading
from pathlib import Path
import numpy as np
from mpi4py import MPI
from collectives import Communicator, wait_all

faulthandler.register(signal.SIGUSR1)

folder, threads = sys.argv[1:]

def work(comm, turns):
    size = comm.Get_size()
    for turn in range(turns):
        n = (1, 100, 40_000)[turn % 3]
        mine, total, whole = np.ones(n), np.zeros(n), np.zeros(n * size)
        comm.Allreduce(mine, total)
        comm.Allgatherv(mine, [whole, [n] * size])
        wait_all([comm.Iallreduce(mine, total), comm.Iallgather(mine, whole)])
        MPI.Request.Waitall([comm.Ibcast(mine, turn % size), comm.Ialltoall(whole, whole.copy())])
        request = comm.Allreduce_init(mine, total)
        request.Start()
        request.Wait()
        request.Free()
        comm.bcast(turn, turn % size)
        if turn % 10 == 0:
            comm.Dup().Free()

comms = [Communicator(MPI.COMM_WORLD.Dup()) for _ in range(1 + int(threads))]
kept = comms[0].zeros(1000)
work(comms[0], 3)
Path(folder, f"rank-{comms[0].Get_rank()}").write_text(str(os.getpid()))
for comm in comms[1:]:
    threading.Thread(target=work, args=(comm, 10**9)).start()
work(comms[0], 10**9)
"""

SECONDS = 100
"""Until all ranks must have ended: some only get to know of it by the abort of another one."""


def interrupted(folder, ranks, threads, delay, interrupt):
    """Run the program; `delay` seconds after all ranks work, call ``interrupt(launch, processes)``, and wait."""
    files = [folder / f"rank-{rank}" for rank in range(ranks)]
    command = [MPIEXEC, "-n", str(ranks), sys.executable, "-c", PROGRAM, str(folder), str(threads)]
    output = folder / "output"
    with output.open("w") as printed:
        launch = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=printed, stderr=printed,
        )  # fmt: skip
    processes = []
    try:
        while not all(file.exists() and file.read_text() for file in files):
            assert launch.poll() is None, "the program ended by itself"
            time.sleep(0.02)
        processes = [int(file.read_text()) for file in files]
        time.sleep(delay)
        interrupt(launch, processes)
        until = time.monotonic() + SECONDS
        while (launch.poll() is None or any(map(is_alive, processes))) and time.monotonic() < until:
            time.sleep(0.05)
        if left := [process for process in processes if is_alive(process)]:
            for process in left:
                os.kill(process, signal.SIGUSR1)
            time.sleep(1)
            pytest.fail(f"ranks {list(map(processes.index, left))} go on:\n{output.read_text()}")
        return launch.wait(SECONDS)
    finally:
        for process in (launch.pid, *processes):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        launch.wait()


INTERRUPTS = {
    "terminal": lambda launch, processes: os.killpg(launch.pid, signal.SIGINT),
    "every rank": lambda launch, processes: [os.kill(process, signal.SIGINT) for process in processes],
    "one rank": lambda launch, processes: os.kill(processes[-1], signal.SIGINT),
}


@pytest.mark.parametrize("delay", default([0.0, 0.1, 0.37, 0.8], 0.1))
@pytest.mark.parametrize("threads", default([0, 1], 1))
@pytest.mark.parametrize("interrupt", default(INTERRUPTS, "one rank"))
def test_all_ranks_end(tmp_path, interrupt, threads, delay):
    assert interrupted(tmp_path, 2, threads, delay, INTERRUPTS[interrupt]) != 0


@pytest.mark.full
@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs a mount of its own")
def test_a_small_folder_for_shared_memory(tmp_path):
    """Communicators share no memory in /dev/shm, which has 64 MiB in containers; MPICH itself needs more than 16."""
    program = PROGRAM.replace("work(comms[0], 10**9)", "work(comms[0], 20)")
    words = f'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {MPIEXEC} -n 2 {sys.executable} -c "$0" {tmp_path} 0'
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", words, program], env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=100,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
