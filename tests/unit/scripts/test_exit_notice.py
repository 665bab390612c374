"""What is said when a program is killed, and when it is not."""

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal
from benchlib.last_word import LastWord

with LastWord({wanted}) as word:
    word.would_be("early")
    word.would_be("it was killed")
    {end}
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_who_is_killed_has_the_last_word(number):
    ended = run(True, f"os.kill(os.getpid(), {int(number)})")
    assert (ended.returncode, ended.stderr) == (-number, "it was killed\n")


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("wanted, end", [(True, "pass"), (True, "raise SystemExit"), (False, KILLED)])
def test_others_say_nothing(wanted, end):
    assert run(wanted, end).stderr == ""


def run(wanted, end):
    code = PROGRAM.format(wanted=wanted, end=end)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=environment())


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
