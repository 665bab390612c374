"""Errors of the user end a program with one line and status 2; those at the end of a program are not silent."""

import os
import shutil
import subprocess
import sys
import textwrap
from importlib import import_module

import pytest
from support.program_runs import call

from parallel.cli.programs import PROGRAMS


def run(*words, ranks=1, **variables):
    """Status, and lines of standard error, of a Python program."""
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    launcher = [shutil.which("mpiexec", path=places), "-n", str(ranks)] if ranks > 1 else []
    ended = subprocess.run(
        [*launcher, sys.executable, *words], capture_output=True, text=True, timeout=100, env=os.environ | variables
    )
    lines = [line for line in ended.stderr.splitlines() if line.strip() and "one rank, since no mpiexec" not in line]
    return ended.returncode, lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("bench quant --turns 0", "expected a whole number from 1 on, found '0'"),
        ("bench quant --size zz", "expected a number and perhaps K, M or G, as in 64K; found 'zz'"),
        ("bench layouts --data nosuch", "neither a file nor one of digits"),
        ("bench layouts --data /", "expected index.json, of shards, or files *.txt; found neither"),
    ],
)
def test_one_line(words, expected):
    group, name, *words = words.split()
    done = call(import_module(PROGRAMS[f"{group} {name}"].module).main, *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and expected in done.stderr


def test_one_line_of_a_process():
    status, lines = run("-m", "parallel.cli.main", "bench", "quant", "--specs", "zz")
    assert status == 2 and len(lines) == 1 and "expected some of int8_g128" in lines[0]


def test_one_line_of_all_ranks():
    status, lines = run("-m", "parallel.cli.main", "bench", "layouts", "--data", "nosuch", ranks=2)
    assert status == 2 and sum("nosuch" in line for line in lines) == 1
    assert not any("Traceback" in line for line in lines)


def test_a_wrong_number_of_ranks_in_the_environment():
    status, lines = run("-m", "parallel.cli.main", "bench", "collectives", CHORUS_RANKS="xyz")
    assert status == 2 and lines[-1].endswith("CHORUS_RANKS: expected the number of ranks that -n started, found 'xyz'")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_variable_of_the_environment(ranks):
    words = ["train", "--model", "mlp:tiny", "--steps", "1"]
    status, lines = run("-m", "parallel.cli.main", *words, ranks=ranks, CHORUS_DEBUG="zz")
    assert status == 2 and len(lines) == 1 and "error: CHORUS_DEBUG: expected 1, true, yes or on" in lines[0]


def test_a_full_disk():
    with open("/dev/full", "w") as full:
        words = ["draw", "pipeline", "--schedule", "1f1b"]
        command = [sys.executable, "-m", "parallel.cli.main", *words]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert ended.returncode == 2 and ended.stderr.splitlines() == ["chorus: error: [Errno 28] No space left on device"]


PROGRAM = """
import numpy as np
from mpi4py import MPI
from collectives import Communicator
comm = Communicator(MPI.COMM_WORLD, tuning=False)
mine, total = np.ones(3), np.zeros(3)
"""


def program(text):
    return PROGRAM + textwrap.dedent(text)


def test_roots_that_differ_in_the_last_call():
    status, lines = run("-c", program("comm.Bcast(mine, comm.Get_rank())"), ranks=2)
    assert status != 0 and any("expected no message from rank" in line for line in lines)


def test_finalize_with_collectives_under_way():
    text = "request = comm.Ibarrier() if comm.Get_rank() else None\nMPI.Finalize()"
    status, lines = run("-c", program(text), ranks=2)
    assert status != 0 and any("MPI.Finalize: 1 collectives are still under way" in line for line in lines)
    assert not any("after finalizing" in line for line in lines)


def test_calls_after_finalize():
    text = """
    comm.Iallreduce(mine, total).Wait()
    MPI.Finalize()
    try:
        comm.Allreduce(mine, total)
    except ValueError as error:
        assert "this communicator was freed" in str(error)
    """
    assert run("-c", program(text), ranks=2)[0] == 0
