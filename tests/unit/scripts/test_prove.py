"""chorus prove collectives proves the catalogue, and ends with a status other than 0 at a planted fault."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.sources import SOURCES

from collectives.algorithms import catalog, mst, ring
from collectives.algorithms.catalog import Algorithm, LowerBound
from collectives.schedule.steps import NOTHING, Recv, Send, span

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ("-m", "parallel.cli.main", "prove", "collectives")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.full
def test_the_catalogue_is_proved_from_the_command_line():
    done = subprocess.run(
        [sys.executable, *PROGRAM, "--max-size", "8"], env=ENVIRONMENT, capture_output=True, text=True,
        timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()
    for collective, entries in catalog.CATALOG.items():
        for name in entries:
            assert any(line.split()[:2] == [collective, name] for line in table), f"{collective} {name} is not shown"
    assert "algorithms for 1 to 8 ranks" in table[-1] and table[-1].startswith("proved ")
    ring_line = next(line for line in table if line.split()[:2] == ["allreduce", "ring"])
    assert ring_line.split()[2:] == ["14", "(3)", "1.75", "(1.75)", "0.875", "(0.875)"]
    tree_line = next(line for line in table if line.split()[:2] == ["reduce", "mst"])
    assert tree_line.endswith("kept")


@pytest.fixture
def prove(monkeypatch, capsys):
    """prove(*arguments) -> (status, output, errors) of the script, run in this process."""
    spec = importlib.util.spec_from_file_location("prove_under_test", SOURCES / "collectives" / "cli" / "prove.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["prove.py", *arguments])
        status = module.main()
        return status, *capsys.readouterr()

    return run


def forgetful(rank, size, root):
    """A broadcast whose last rank gets nothing as soon as there are five."""
    for steps in mst.broadcast(rank, size, root):
        yield [step for step in steps if size < 5 or not lost(step, rank, size)]


def lost(step, rank, size):
    return size - 1 in (rank, step.peer)


def stuck(rank, size):
    """Everyone sends, then receives: a circle."""
    for peer in {(rank + 1) % size} - {rank}:
        yield [Send(peer, NOTHING)]
        yield [Recv((rank - 1) % size, NOTHING)]


def wrong_segments(rank, size):
    """Right in one piece, but in segments a rank overwrites what it still sends."""
    yield from ring.allgather(rank, size)
    if size > 1:
        yield [Send((rank + 1) % size, span(0, size)), Recv((rank - 1) % size, span(size, 2 * size))]


FAULTS = {
    # collective, the planted line, what is said on which error stream
    "lost": ("broadcast", Algorithm(forgetful, "q", "q"), "broadcast planted, 5 ranks, root 0, 1 segments: rank 4"),
    "deadlock": ("barrier", Algorithm(stuck, "q"), "barrier planted, 2 ranks, root 0, 1 segments: deadlock: rank 0"),
    "rounds": (
        "allreduce", Algorithm(ring.allreduce, "p-1", "2*(p-1)/p", "(p-1)/p"),
        "rounds: the catalogue expects p-1 = 1, found 2",
    ),
    "volume": (
        "allreduce", Algorithm(ring.allreduce, "2*(p-1)", "(p-1)/p", "(p-1)/p"),
        "volume: the catalogue expects (p-1)/p = 1/2, found 1",
    ),
    "combined": (
        "allreduce", Algorithm(ring.allreduce, "2*(p-1)", "2*(p-1)/p", "p"),
        "combined: the catalogue expects p = 2, found 1/2",
    ),
    "order": (
        "allreduce", Algorithm(ring.allreduce, "2*(p-1)", "2*(p-1)/p", "(p-1)/p", ordered=True),
        "allreduce planted does not keep rank order, but the catalogue states it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_ends_with_a_status(prove, monkeypatch, fault):
    collective, entry, message = FAULTS[fault]
    monkeypatch.setitem(catalog.CATALOG[collective], "planted", entry)
    status, _, errors = prove("--max-size", "6", "--collective", collective)
    assert status == 1
    assert message in errors


def test_costs_below_the_bound_are_a_fault(prove, monkeypatch):
    monkeypatch.setitem(catalog.BOUNDS, "broadcast", LowerBound("q", "2"))
    status, _, errors = prove("--max-size", "3", "--collective", "broadcast")
    assert status == 1
    assert "volume: expected at least 2 = 2, the lower bound, found 1" in errors


def test_without_a_fault_the_same_call_ends_with_zero(prove):
    status, output, _ = prove("--max-size", "3", "--collective", "allreduce")
    assert status == 0
    assert "allreduce" in output and "broadcast" not in output
