"""Restarts of a training after the death of a rank: options, folder of the kept states, and when to restart.

The launcher process locks the folder and starts mpiexec again. The states themselves are the ranks'
(`parallel.trainer.state_keeper`). Imports no MPI.
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from parallel.cli import launched_ranks, watchdog

MEMORY = Path("/dev/shm")
RESTARTS = 10  # default of --survive
LOCK = "lock"  # file in the folder on the launcher's node
CLEARED = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"
CLEARING = 30.0  # seconds at most in which the ranks' nodes remove the folder
ORDERLY = (0, 2)  # exit statuses of a training at its end, and of one that cannot begin
ERROR = 1  # also of a rank that has noticed the death of another
STOPS = [code for one in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM) for code in (one, 128 + one, -one)]
"""Exit statuses of an mpiexec after a signal by which users and batch systems end programs."""


def add_survive(parser: argparse.ArgumentParser) -> None:
    """Add the options of restarts to a parser."""
    add = parser.add_argument_group("restarts").add_argument
    text = f"after a rank's death restart all, N times at most (default {RESTARTS}), from their states in memory"
    add("--survive", nargs="?", type=int, const=RESTARTS, metavar="N", help=text)
    text = "steps between two states (default: 1, or as many as take 5%% of the time)"
    add("--survive-every", type=int, metavar="K", help=text)
    add("--survive-in", nargs=2, metavar=("FOLDER", "ATTEMPT"), help=argparse.SUPPRESS)  # by the launcher


def survive_error(args: argparse.Namespace) -> str | None:
    """Text if the options of restarts are wrong. Otherwise None."""
    if args.survive is None:
        return None if args.survive_every is None else "--survive-every: expected --survive"
    for name, value in (("--survive", args.survive), ("--survive-every", args.survive_every)):
        if value is not None and value < 1:
            return f"{name}: expected 1 or more, found {value}"
    # under another mpiexec nothing restarts the ranks, unless they survive
    if args.survive_in is None and watchdog.fault_tolerant():
        return None
    if args.survive_in is None or not args.survive_in[1].isdecimal():
        return "--survive: expected chorus train -n N --survive, which starts the ranks, and starts them again"
    if args.plot is not None and args.json is None:
        return "--survive: with --plot expected --json FILE, which keeps the learning curve of all starts"
    return None


def restarts_in(words: Sequence[str]) -> int | None:
    """Number of restarts that a command line allows. None without --survive, or if the ranks will refuse it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_survive(parser)
    try:
        found: int | None = parser.parse_known_args(words)[0].survive
    except argparse.ArgumentError:
        return None
    return found if found is not None and found >= 1 else None


def run(command: list[str], environment: Mapping[str, str], ranks: int, restarts: int) -> int:
    """Run the launcher of a training on some ranks, again after a rank has died. Returns its exit status.

    OSError if it cannot be started. ValueError if the same command runs already, started in this directory.
    """
    with _claimed(_folder_of(command)) as folder:
        attempts = 0

        def again(status: int) -> list[str] | None:
            nonlocal attempts
            cause = f"a rank has died (exit status {status})"
            if not _is_death(status, folder):
                return None
            if attempts == restarts:
                print(f"chorus train: {cause}, after {restarts} restarts: no further one", file=sys.stderr)
                return None
            attempts += 1
            print(f"chorus train: {cause}: restart {attempts} of at most {restarts}", file=sys.stderr, flush=True)
            return [*command, "--survive-in", str(folder), str(attempts)]

        first = [*command, "--survive-in", str(folder), "0"]
        status = launched_ranks.run(first, dict(environment), again)
        if len({path.name.split("-")[1] for path in folder.glob("rank-*")}) < ranks:  # others have been on other nodes
            with contextlib.suppress(subprocess.TimeoutExpired):
                clear = [*command[: command.index(sys.executable) + 1], "-c", CLEARED, str(folder)]
                quiet = subprocess.DEVNULL
                subprocess.run(clear, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, timeout=CLEARING)
        return status


def _is_death(status: int, folder: Path) -> bool:
    """True if the ranks ended with this status since one has died, none by an error or in order."""
    names = os.listdir(folder)
    if status in ORDERLY or any(name.startswith("ended-") for name in names):
        return False
    if status == ERROR:
        return any(name.startswith("rank-") for name in names)
    return status not in STOPS


def _folder_of(command: Sequence[str]) -> Path:
    """Folder of the states of this user's training with this command, started in this directory."""
    text = "\0".join([os.getcwd(), *command])
    return MEMORY / f"chorus-{os.geteuid()}-{sha256(os.fsencode(text)).hexdigest()[:16]}"


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[Path]:
    """Context that creates, locks and clears the folder, and removes it at the end. ValueError if it cannot."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(0o700, exist_ok=True)
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                raise ValueError(f"--survive: {folder} belongs to another user")
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in folder.iterdir():
                if path.name != LOCK:
                    path.unlink()
        except BlockingIOError as error:
            raise ValueError("--survive: the same command already runs, started in this directory") from error
        except OSError as error:
            raise ValueError(f"--survive: expected a folder in memory: {error}") from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder
