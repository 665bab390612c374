"""Ranks started by programs: none outlives its launch, whether time or a signal ends it."""

import os
import signal
import subprocess
import sys
import time

import mpi_launches
import pytest
from mpi_launches import ROOT, descendants, end_ranks, exit_on_signals
from support.launches import MPIEXEC, is_alive, launch_environment, needs_mpiexec

pytestmark = [needs_mpiexec, pytest.mark.timeout(200)]

RANKS = 2

RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.mkdir(f"{sys.argv[1]}/{os.getpid()}")
time.sleep(1000)
"""

GRACE = 1
"""Seconds for mpiexec to end ranks that ignore its signal."""

LAUNCH = f"""
import sys
import mpi_launches
mpi_launches.GRACE = {GRACE}
mpi_launches.run_ranks({MPIEXEC!r}, {RANKS}, ["-c", {RANK!r}, sys.argv[1]], 1000)
"""


def processes_in(folder):
    return [int(name) for name in os.listdir(folder)]


def wait_for_ranks(program, folder):
    while len(processes_in(folder)) < RANKS:
        assert program.poll() is None
        time.sleep(0.05)


def assert_ended(processes):
    until = time.monotonic() + 20
    while (left := list(filter(is_alive, processes))) and time.monotonic() < until:
        time.sleep(0.05)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert len(processes) == RANKS and not left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_ranks_end_with_the_program_that_started_them(tmp_path, number):
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(tmp_path)],
        env=launch_environment(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests/studies")])),
    ) as program:
        wait_for_ranks(program, tmp_path)
        processes = processes_in(tmp_path)
        assert set(processes) <= set(descendants(program.pid))
        program.send_signal(number)
        time.sleep(0.2)
        program.send_signal(number)  # as from `timeout`, while the ranks are being ended
        assert program.wait() == (-number if number == signal.SIGINT else 128 + number)
    assert_ended(processes)


def test_a_launcher_ends_with_ranks_that_ignore_its_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(mpi_launches, "GRACE", GRACE)
    command = [MPIEXEC, "-n", str(RANKS), sys.executable, "-c", RANK, str(tmp_path)]
    with subprocess.Popen(command, env=launch_environment(), start_new_session=True) as launcher:
        wait_for_ranks(launcher, tmp_path)
        end_ranks(launcher)
    assert_ended(processes_in(tmp_path))


@pytest.mark.parametrize("number, error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signals_of_the_program_get_their_handlers_back(number, error):
    before = signal.getsignal(number)
    with pytest.raises(error), exit_on_signals():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before
