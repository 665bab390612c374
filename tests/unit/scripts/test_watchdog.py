"""Ranks of a node that need each other end together, when one of them dies."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from parallel.cli import watchdog

LAUNCHER = """
import os, subprocess, time
ranks = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
os.wait()
time.sleep(1000)
"""

LOOKING = """
import runpy, sys
watch, (_, launcher, rank, count, grace) = runpy.run_path(sys.argv[1])["watch"], sys.argv[1:]
children = watch.__globals__["children"]

def printed(parent):
    found = children(parent)
    print(len(found), flush=True)
    return found

watch.__globals__["children"] = printed
watch(int(launcher), int(rank), int(count), float(grace))
"""
"""Watchdog that prints the number of ranks at each look."""

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="no /proc")


@pytest.fixture
def launcher():
    """The process of a launcher that has started two ranks, and their numbers."""
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER])
    until(lambda: len(watchdog.children(process.pid)) == 2)
    ranks = sorted(watchdog.children(process.pid))
    yield process, ranks
    process.kill()
    process.wait()
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def beside(launcher, rank, grace):
    """What looks after the ranks, beside one of them."""
    words = [sys.executable, "-I", "-c", LOOKING, watchdog.__file__, str(launcher.pid), str(rank), "2", str(grace)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(words, env={}, **pipes)
    assert process.stdout.readline() == b"2\n"  # it has seen both
    return process


def until(enough):
    """Wait, up to the test's limit of time."""
    while not enough():
        time.sleep(0.02)


def test_a_death_ends_the_launcher_with_one_message(launcher):
    process, ranks = launcher
    looking = [beside(process, rank, grace) for rank, grace in zip(ranks, (0.5, 30.0))]  # one is first, on any machine
    os.kill(ranks[1], signal.SIGKILL)
    assert process.wait() == -signal.SIGTERM
    said = [other.communicate()[1].decode() for other in looking]
    assert said[0] == f"a rank has died (process {ranks[1]}), and the others need it: all end\n"
    assert said[1] == ""


def test_a_stopped_watchdog_does_nothing(launcher):
    process, ranks = launcher
    looking = beside(process, ranks[0], grace=0.0)
    looking.communicate()
    os.kill(ranks[1], signal.SIGKILL)
    assert looking.returncode == 0
    time.sleep(0.5)
    assert process.poll() is None


def test_ranks_may_end_one_after_the_other(launcher):
    process, ranks = launcher
    looking = beside(process, ranks[0], grace=60.0)
    os.kill(ranks[1], signal.SIGKILL)
    time.sleep(0.5)
    assert looking.poll() is None and process.poll() is None
    looking.communicate()


@pytest.mark.parametrize(
    "environment, so",
    [({}, False), ({"OMPI_MCA_mpi_ft_enable": "0"}, False), ({"OMPI_MCA_mpi_ft_enable": "1"}, True)],
)
def test_only_fault_tolerant_launches_are_watched(monkeypatch, environment, so):
    monkeypatch.delenv("OMPI_MCA_mpi_ft_enable", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert watchdog.fault_tolerant() is so
    watchdog.start()
    assert bool(watchdog._processes) is so
    watchdog.stop()
    assert not watchdog._processes
