"""Programs run on several ranks under mpiexec, ended after a time limit and by signals to this process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]

GRACE = 5
"""Seconds that mpiexec has to end its ranks."""


def find_mpiexec() -> str | None:
    """Path of mpiexec: from the variable MPIEXEC, else beside this Python, else on PATH; None if there is none."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ.get("MPIEXEC") or shutil.which("mpiexec", path=places)


def descendants(process: int) -> list[int]:
    """Processes that a process has started, and those started by them."""
    children: dict[int, list[int]] = defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = file.read_text(errors="replace").rpartition(")")[2].split()
            children[int(fields[1])].append(int(file.parent.name))
    found = [process]
    for parent in found:
        found += children[parent]
    return found[1:]


def end_ranks(launcher: subprocess.Popen[Any]) -> None:
    """End mpiexec and all its ranks: by SIGTERM to mpiexec, then by SIGKILL to what is left after `GRACE` seconds."""
    processes = descendants(launcher.pid)  # under MPICH and Intel MPI each rank is a session of its own
    launcher.terminate()
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(GRACE)
    launcher.kill()
    for end, process in [(os.killpg, launcher.pid), *((os.kill, process) for process in processes)]:
        with suppress(ProcessLookupError, PermissionError):
            end(process, signal.SIGKILL)
    launcher.wait()


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT and SystemExit on SIGTERM, so that ``finally`` clauses run.

    Later ones are ignored meanwhile: ``timeout`` sends two, one of them to the process group.
    """

    def leave(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_ranks(mpiexec: str, ranks: int, arguments: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run Python, which finds the same modules, with `arguments` on all ranks; return status and last lines printed.

    The status is None after `limit` seconds. The ranks end with this process if SIGINT or SIGTERM ends it.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    command = [mpiexec, "-n", str(ranks), sys.executable, *arguments]
    with exit_on_signals(), tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
        finally:
            if process.poll() is None:
                end_ranks(process)
        output.seek(0)
        return status, "\n".join(output.read().splitlines()[-40:])


class Launch(NamedTuple):
    """Launch of a module on all ranks, which write JSON lines to ``rank-N`` and stacks to ``stack-N`` in `folder`."""

    mpiexec: str
    ranks: int
    module: str
    folder: Path

    def run(self, options: list[str], limit: float) -> tuple[int | None, str]:
        """Run the module with these options; return exit status and last lines printed, as `run_ranks` does."""
        return run_ranks(self.mpiexec, self.ranks, ["-m", self.module, str(self.folder), *options], limit)

    def _written(self, name: str) -> str:
        file = self.folder / name
        return file.read_text() if file.exists() else ""

    def lines(self, rank: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._written(f"rank-{rank}").splitlines()]

    def stack(self, rank: int) -> str:
        return self._written(f"stack-{rank}")


def describe_end(status: int | None, output: str) -> str:
    how = "did not end" if status is None else f"ended with status {status}"
    return f"mpiexec {how}; its last lines:\n{output}"
