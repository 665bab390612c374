"""Programs that tests start on several ranks."""

import os
import subprocess
import sys
import tempfile
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


OWN_FILE = 'exec "$@" >"$0/$$" 2>&1'
"""Shell program that runs a command with its output in a file of its own: Python writes an error line in pieces."""


def start_ranks(ranks, words, **environment):
    """Start Python with these words on all ranks, each of which writes output and errors to a file of its own."""
    folder = tempfile.TemporaryDirectory(prefix="chorus-ranks-")
    rank = ["sh", "-c", OWN_FILE, folder.name, sys.executable, *map(str, words)]
    process = _start([MPIEXEC, "-n", str(ranks), *rank], **environment)
    process.folder = folder
    return process


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
    """Output of a started program after its end: of the launcher, then of each rank. The test's limit ends both."""
    try:
        texts = [process.communicate()[0]]
    finally:
        process.kill()
    if folder := getattr(process, "folder", None):
        with folder:
            texts += [file.read_text(errors="replace") for file in sorted(Path(folder.name).iterdir())]
    return "".join(texts)


def is_alive(process):
    """True for the id of a process that runs; False after its end, even before its parent has taken note of it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
