"""scripts/test says that it has cut off a run that takes too long, and counts it as failed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="no timeout program")

IN_PLACE_OF_AN_ENVIRONMENT = """
prepare() { python="$PWD/slow" mpiexec="$PWD/slow"; }
"""


def run(folder, seconds, limit):
    """Run a copy of the script whose Python takes so long."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/test", folder / "scripts/test")
    functions = (ROOT / "scripts/_environment.sh").read_text()
    (folder / "scripts/_environment.sh").write_text(functions + IN_PLACE_OF_AN_ENVIRONMENT)
    slow = folder / "slow"
    lines = "#!/bin/sh", 'while [ "$1" != --tally ]; do shift; done', f"[ {seconds} = 0 ] || exec sleep {seconds}"
    slow.write_text("\n".join([*lines, 'echo 3 0 0 >"$2"', ""]))
    slow.chmod(0o755)
    command = ["scripts/test", "--mpi", "mpich", "--", "tests/unit/test_any.py"]
    environment = os.environ | {"CHORUS_TEST_LIMIT": str(limit)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_run_that_is_cut_off_is_reported(tmp_path):
    done = run(tmp_path, 100, 1)
    assert "mpich, unit tests: CUT OFF after 1 s" in done.stderr and "CHORUS_TEST_LIMIT" in done.stderr
    assert done.returncode != 0 and done.stdout.endswith("0 passed, 1 failed\n")


def test_another_is_not(tmp_path):
    done = run(tmp_path, 0, 100)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("3 passed, 0 failed\n")
