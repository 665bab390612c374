"""The harness for many ranks does what it promises: one report, shared failures, and never a hang.

Each test writes a small test file and runs it under mpiexec, as scripts/test does.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launches import MPIEXEC, launch_environment, needs_mpiexec

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    needs_mpiexec,
    pytest.mark.timeout(300),
]

PREAMBLE = """
import pytest, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
rank, size = world.rank, world.size
last = size - 1
"""


@pytest.fixture
def run(tmp_path):
    """run(ranks, source, *options) -> (exit status, output) of pytest on a file with that source."""

    def run(ranks, source, *options):
        file = tmp_path / "test_generated.py"
        file.write_text(PREAMBLE + source)
        environment = launch_environment(
            PYTHONPATH=str(ROOT / "tests"),
            COLUMNS="160",
            NO_COLOR="1",  # Open MPI gives its ranks a terminal
        )
        command = [
            MPIEXEC, "-n", str(ranks), sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml",
            "--rootdir", tmp_path, "-p", "support.harness", "--with-mpi", *options, file,
        ]  # fmt: skip
        done = subprocess.run(
            command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=280, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 3])
def test_one_rank_reports(run, ranks):
    status, output = run(ranks, "def test_good():\n    assert world.allreduce(1) == size\n")
    assert status == 0
    assert output.count("1 passed") == output.count("test session starts") == 1


@pytest.mark.full
def test_counts_are_written_once(run, tmp_path):
    source = """
def test_good(): pass
def test_bad(): assert rank != last
def test_none(): pytest.skip("no")
"""
    status, output = run(2, source, "--tally", tmp_path / "tally")
    assert status == 1
    assert (tmp_path / "tally").read_text() == "1 1 1\n"
    assert "1 failed, 1 passed, 1 skipped" in output


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.full)])
def test_failure_of_one_rank_fails_all_and_is_shown(run, ranks):
    source = """
def test_bad():
    print("heard from", rank)
    assert rank != last, "unhappy"
def test_after():
    assert world.allreduce(1) == size
"""
    status, output = run(ranks, source)
    assert status == 1
    assert "1 failed, 1 passed" in output
    assert f"failed on rank {ranks - 1} of {ranks}" in output
    assert 'assert rank != last, "unhappy"' in output
    assert f"heard from {ranks - 1}" in output


@pytest.mark.full
def test_same_failure_everywhere_is_shown_once(run):
    status, output = run(3, "def test_bad():\n    assert size < 0, 'negative'\n")
    assert status == 1
    assert "failed on ranks 0, 1, 2 of 3" in output
    assert output.count("AssertionError: negative") == 2  # the traceback, and the summary


@pytest.mark.full
def test_fixtures_fail_together(run):
    source = """
@pytest.fixture
def early():
    assert rank != last, "early"
@pytest.fixture
def late():
    yield
    assert rank != 0, "late"
def test_early(early): raise RuntimeError("not reached")
def test_late(late): pass
"""
    status, output = run(3, source)
    assert status == 1
    assert "1 passed, 2 errors" in output
    assert "rank 2: AssertionError: early" in output
    assert "rank 0: AssertionError: late" in output
    assert "not reached" not in output


@pytest.mark.full
def test_skips_must_agree(run):
    source = """
def test_all(): pytest.skip("nobody")
def test_one():
    if rank == last: pytest.skip("just me")
"""
    status, output = run(2, source)
    assert status == 1
    assert "1 failed, 1 skipped" in output
    assert "the ranks disagree about the outcome" in output
    assert "rank 1: skipped: Skipped: just me" in output


@pytest.mark.full
def test_failure_inside_a_collective_stops_the_others(run):
    """The last rank never sends what the others wait for: not a hang, but its traceback and their stacks."""
    source = """
def test_earlier():
    assert rank != 0, "an earlier failure"
def test_bad():
    if rank == last:
        raise ValueError("left early")
    world.recv(source=last)
"""
    status, output = run(3, source)
    assert status != 0
    assert "ValueError: left early" in output
    assert "rank 2 failed" in output
    assert "an earlier failure" in output
    for rank in (0, 1):
        assert re.search(rf"rank {rank} stands at\n.*\n.*test_generated.py\", line \d+ in test_bad", output)


STUCK_IN_CALL = """
@pytest.mark.timeout(3)
def test_stuck():
    world.recv(source=rank, tag=7)
"""
STUCK_IN_TEARDOWN = """
@pytest.fixture
def fixture():
    yield
    world.recv(source=rank, tag=7)
@pytest.mark.timeout(3)
def test_failed(fixture):
    assert False
"""


@pytest.mark.parametrize(
    "ranks, source",
    [
        pytest.param(1, STUCK_IN_CALL, marks=pytest.mark.full),
        (3, STUCK_IN_CALL),
        pytest.param(2, STUCK_IN_TEARDOWN, marks=pytest.mark.full),
    ],
    ids=range(3),
)
def test_hang_ends_in_stacks_of_all_ranks(run, ranks, source):
    status, output = run(ranks, source)
    assert status != 0
    assert re.search(r"test_(stuck|failed) outlasted its limit of 3 s", output)
    assert len(re.findall(r"test_generated.py\", line \d+ in (test_stuck|fixture)", output)) == ranks
    assert output.count("outlasted") == 1


@pytest.mark.full
def test_collections_must_agree(run):
    source = "if rank == last: import does_not_exist\ndef test_good(): pass\n"
    status, output = run(3, source)
    assert status == 1
    assert "rank 2 of 3 could not collect the tests" in output
    assert "No module named 'does_not_exist'" in output
    status, output = run(2, "if rank == last:\n    def test_mine(): pass\ndef test_good(): pass\n")
    assert status == 1
    assert "rank 1 collected other tests than rank 0: test_generated.py::test_mine" in output


@pytest.mark.full
def test_order_is_that_of_rank_0(run):
    source = """
import random
cases = list("abcdefghijkl")
random.Random(rank).shuffle(cases)
@pytest.mark.parametrize("case", cases)
def test_case(case):
    assert world.allgather(case) == [case] * size
"""
    status, output = run(3, source)
    assert status == 0, output
    assert "12 passed" in output


@pytest.mark.full
def test_rank_that_walks_out_stops_the_run(run):
    source = "def test_out():\n    if rank == last: pytest.exit('enough')\ndef test_good(): pass\n"
    status, output = run(2, source)
    assert status != 0
    assert "the ranks are not in step" in output


@pytest.mark.full
def test_hypothesis_shrinks_in_step(run):
    pytest.importorskip("hypothesis")
    source = """
from hypothesis import given, strategies as st
@given(st.integers(0, 1000))
def test_example(n):
    assert world.allgather(n) == [n] * size
    assert rank != last or n < 10, "too large"
def test_after():
    assert world.allreduce(1) == size
"""
    status, output = run(3, source)
    assert status == 1
    assert "1 failed, 1 passed" in output
    assert "on rank 2 of 3:" in output
    assert re.search(r"n=10\b", output)


def test_nothing_is_left_behind(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    run(2, "def test_good(tmp_path): (tmp_path / 'x').touch()\n")
    assert not list((tmp_path / "scratch").glob("chorus-tests-*"))
