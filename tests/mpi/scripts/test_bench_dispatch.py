"""chorus bench dispatch under MPI: a row for every dispatch, and refusals."""

import pytest
from mpi4py import MPI
from support.program_runs import call

from parallel.cli import bench_dispatch

SMALL = "--tokens", 5, "--width", 8, "--turns", 1, "--choices", 2
LEADS = MPI.COMM_WORLD.Get_rank() == 0


def test_rows():
    found = call(bench_dispatch.main, *SMALL, "--dispatch", "direct,hierarchical,direct:int8")
    assert found.returncode == 0
    if LEADS:
        rows = [line.split()[0] for line in found.stdout.splitlines()[-3:]]
        assert rows == ["direct", "hierarchical", "direct:int8"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--dispatch", "fast"], "expected direct or hierarchical"),
        (["--choices", 999], "choices: expected"),
        (["--token-nodes", 99], "choices: expected 99 of"),
    ],
)
def test_refusals(options, message):
    found = call(bench_dispatch.main, *SMALL, *options)
    assert found.returncode == 2 and (not LEADS or message in found.stdout + found.stderr)
