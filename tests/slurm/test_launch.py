"""Ranks under srun and the MPI's own launcher; wrong launches, which are named."""

import re
import shlex
import sys

import pytest
from support.slurm_jobs import HELLO, Job, call

pytestmark = pytest.mark.timeout(500)

TRAIN = ("chorus", "train", "--data", "digits", "--model", "mlp", "--steps", "3")
TWO_NODES = [("node1", "2"), ("node1", "2"), ("node2", "2"), ("node2", "2")]
PMI2 = "/usr/lib/x86_64-linux-gnu/libpmi2.so.0"


def places(output):
    """Node of each rank and number of ranks there; all of a world of four."""
    found = re.findall(r"rank (\d) of 4 at (\S+) (\d)", output)
    return [place[1:] for place in sorted(found)]


def test_srun(mpi):
    command = ("srun", "-N", "2", "--ntasks-per-node=2", sys.executable, "-c", HELLO)
    assert places(call(*command)) == TWO_NODES
    if mpi == "Intel":
        assert places(call(*command, SLURM_MPI_TYPE="pmi2", I_MPI_PMI_LIBRARY=PMI2)) == TWO_NODES


def test_launcher_in_an_allocation(mpi, tmp_path):
    """The Open MPI wheel is built without Slurm: its launcher takes the first node alone."""
    (tmp_path / "hello.py").write_text(HELLO)
    launch = f'mpiexec -n 4 "{sys.executable}" hello.py'
    output = Job(tmp_path, f"#!/bin/bash\n{launch}\n", "-N2", "--ntasks-per-node=2").end()
    assert places(output) == ([("node1", "4")] * 4 if mpi == "Open MPI" else TWO_NODES)


def test_first_line():
    output = call("srun", "-N", "2", "--ntasks-per-node=2", "--time=10", *TRAIN)
    assert re.match(r"(srun: .*\n)*4 ranks on 2 nodes, Slurm job \d+, time left 0:(0\d:\d\d|10:00)\n", output), output
    assert " on 4 ranks of 1 thread, 3 steps" in output


def test_wrong_pmi(mpi):
    """Each process is alone, and one of them prints the right command."""
    right = {"MPICH": "pmi2", "Open MPI": "pmix"}.get(mpi, "pmix, or I_MPI_PMI_LIBRARY")
    for wrong in ["none", "pmi2"] if mpi == "Open MPI" else ["none"]:
        output = call("srun", f"--mpi={wrong}", "-n", "4", *TRAIN, expect=2)
        text = f"srun has started 4 tasks, and each is the only rank of its MPI: start them with srun --mpi={right}"
        assert output.count(text) == 1, output
        assert "steps" not in output


FIRST_LINE = re.compile(r"^2 ranks on 1 node, Slurm job \d+$", re.MULTILINE)


def test_shell_of_an_allocation():
    """The shell is no rank of its own: -n starts ranks. In that of a step, srun does. No time limit is shown."""
    shell = call("bash", "-c", f"echo {shlex.join(TRAIN)} -n 2 | salloc -N1 -n2")
    assert FIRST_LINE.search(shell), shell
    step = call("srun", "-n1", "--cpus-per-task=2", "bash", "-c", f"srun --overlap -n 2 {shlex.join(TRAIN)}")
    assert FIRST_LINE.search(step), step


LATE = """
import sys, time
from pathlib import Path
from mpi4py import MPI
from parallel.cli import main, start_up

start_up.PATIENCE, wait, arrived = 0.5, start_up.wait_for_all, Path(sys.argv.pop(1))
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

def late(nodes):
    if rank == 0:
        arrived.touch()
    if rank == size - 1:
        while not arrived.exists():
            time.sleep(0.01)
        time.sleep(2)
    wait(nodes)

start_up.wait_for_all = late
sys.exit(main.main(sys.argv[1:]))
"""
"""`chorus` whose last rank comes two seconds after the first one; arguments are a file, and those of chorus."""


def test_late_rank_is_named(tmp_path):
    output = call(
        "srun", "-N", "2", "--ntasks-per-node=2", sys.executable, "-c", LATE, tmp_path / "arrived", *TRAIN[1:]
    )
    assert re.search(r"after \d+ s rank 0 waits for (rank .*, )?rank 3 on node2\n", output), output


def test_rank_that_does_not_start_mpi(tmp_path):
    """The notice comes from a process of its own, while MPI_Init waits."""
    late = """
import os, sys, time
from pathlib import Path
from parallel.cli import main, start_up
start_up.PATIENCE, arrived = 1, Path(sys.argv.pop(1))
if os.environ["SLURM_PROCID"] == "0":
    arrived.touch()
if os.environ["SLURM_PROCID"] == "3":
    while not arrived.exists():
        time.sleep(0.01)
    time.sleep(4)
sys.exit(main.main(sys.argv[1:]))
"""
    output = call(
        "srun", "-N", "2", "--ntasks-per-node=2", sys.executable, "-c", late, tmp_path / "arrived", *TRAIN[1:]
    )
    assert "rank 0 on node1 has waited 1 s for ranks that have not started MPI\n" in output, output
