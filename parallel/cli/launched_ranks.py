"""MPI launcher as a child process. A first Ctrl-C or SIGTERM becomes a request to stop: SIGUSR1.

Launchers pass SIGUSR1 on to all ranks and go on. A training ends after its step and saves. With Ctrl-C they differ:
MPICH's and Intel MPI's pass it on and wait, Open MPI's kills all ranks half a second later. A second signal reaches
the launcher unchanged. Imports no MPI.
"""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from subprocess import Popen
from types import FrameType

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def run(
    command: list[str],
    environment: dict[str, str],
    again: Callable[[int], list[str] | None] = lambda status: None,
) -> int:
    """Run the launcher to its end. Returns its exit status, or 128 + number of the signal that has stopped it.

    It has its own process group, so that no signal of the terminal reaches it, and no terminal as standard input.
    After an end without a signal to this process, ``again(status)`` returns the next command to run in its place, or
    None. OSError if it cannot be started.
    """
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
    start = partial(Popen, env=environment, stdin=stdin, process_group=0, preexec_fn=_end_with_parent)
    launcher = start(command)
    stops: list[int] = []
    others: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        launcher.send_signal(number if stops else signal.SIGUSR1)
        stops.append(number)

    def forward(number: int, frame: FrameType | None) -> None:
        launcher.send_signal(number)
        others.append(number)

    def suspend(number: int, frame: FrameType | None) -> None:
        launcher.send_signal(signal.SIGTSTP)
        signal.raise_signal(signal.SIGSTOP)  # until SIGCONT
        launcher.send_signal(signal.SIGCONT)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGTSTP, suspend)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    status = launcher.wait()
    while not (stops or others) and (following := again(status)):
        launcher = start(following)
        if stops or others:  # while it started
            launcher.terminate()
        status = launcher.wait()
    if status and stops:
        return 128 + stops[0]
    return status if status >= 0 else 128 - status


def _end_with_parent() -> None:
    """Let Linux end this process when its parent is killed."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
