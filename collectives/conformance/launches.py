"""A launch under mpiexec that ends in any case."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def find_mpiexec() -> str | None:
    """The one named by MPIEXEC, that of this Python's environment, or that of PATH."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ.get("MPIEXEC") or shutil.which("mpiexec", path=places)


def launched(command: list[str], limit: float) -> tuple[int | None, str]:
    """Run a command in a process group of its own: its status, None past the limit, and its last lines."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    }
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait(limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            process.returncode = None
        output.seek(0)
        return process.returncode, "\n".join(output.read().splitlines()[-40:])
