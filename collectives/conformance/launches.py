"""Programs run on several ranks under mpiexec, killed after a time limit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


def find_mpiexec() -> str | None:
    """Path of mpiexec: from the variable MPIEXEC, else beside this Python, else on PATH; None if there is none."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ.get("MPIEXEC") or shutil.which("mpiexec", path=places)


def run_ranks(mpiexec: str, ranks: int, arguments: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run Python, which finds the same modules, with `arguments` on all ranks; return status and last lines printed.

    The status is None after `limit` seconds.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), *filter(None, sys.path)])
    command = [mpiexec, "-n", str(ranks), sys.executable, *arguments]
    with tempfile.TemporaryFile("w+") as output:
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
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
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
