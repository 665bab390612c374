"""The last message of a program: printed if it is killed, and only then."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import os, signal
from collectives.cli.exit_notice import ExitNotice

with ExitNotice({wanted}) as word:
    word.set_text("early")
    word.set_text("it was killed")
    {end}
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_program_prints_the_message(number):
    ended = run(True, f"os.kill(os.getpid(), {int(number)})")
    assert (ended.returncode, ended.stderr) == (-number, "it was killed\n")


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("wanted, end", [(True, "pass"), (True, "raise SystemExit"), (False, KILLED)])
def test_others_print_nothing(wanted, end):
    assert run(wanted, end).stderr == ""


def test_another_stream(tmp_path):
    """To a launcher's own output, for one that forwards nothing after its end."""
    with (tmp_path / "out").open("a") as stream:
        code = f"""
import os, signal
from collectives.cli.exit_notice import ExitNotice
word = ExitNotice(True, open({stream.name!r}, "a"))
word.set_text("it was killed")
{KILLED}
"""
        assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, env=environment()).stderr == b""
    deadline = time.monotonic() + 100
    while (tmp_path / "out").read_text() != "it was killed\n":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run(wanted, end):
    code = PROGRAM.format(wanted=wanted, end=end)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, env=environment())


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
