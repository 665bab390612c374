"""Programs that tests start on several ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_launches import ROOT, find_mpiexec

from parallel.cli.main import LAUNCH_DEFAULTS

MPIEXEC = find_mpiexec()

needs_mpiexec = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec")


def launch_environment(**more):
    """This process's environment, in which any MPI starts more ranks than cores, also for root, and finds the project.

    scripts/_environment.sh sets the same; this is for a run of pytest by hand.
    """
    return os.environ | LAUNCH_DEFAULTS | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | more


def start_ranks(ranks, words, **environment):
    """Start Python with these words on all ranks; its output and errors are one stream of text."""
    return _start([MPIEXEC, "-n", str(ranks), sys.executable, *map(str, words)], **environment)


def _start(command, **environment):
    return subprocess.Popen(
        command, env=launch_environment(**environment), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip


def start_command(ranks, words, **environment):
    """Start ``chorus -n RANKS WORDS``; its output and errors are one stream of text."""
    command = [sys.executable, "-m", "parallel.cli.main", "-n", str(ranks), *map(str, words)]
    return _start(command, MPIEXEC=MPIEXEC, **environment)


def ended(process):
    """Output of a program that `start_ranks` started, after its end; the test's limit of time ends both."""
    try:
        return process.communicate()[0]
    finally:
        process.kill()


def is_alive(process):
    """True for the id of a process that runs; False after its end, even before its parent has taken note of it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
