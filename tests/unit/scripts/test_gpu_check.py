"""scripts/gpu_check on the stand-in for CuPy: every line of the tests for a GPU runs, and every line of the script."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MPIEXEC = os.environ.get("MPIEXEC") or shutil.which(
    "mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)
needs_mpiexec = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec")


def gpu_check(*arguments, **environment):
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_", "PYTEST_"))},
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT / "tests" / "support" / "standin"),
        **({"MPIEXEC": MPIEXEC} if MPIEXEC else {}),
        **environment,
    }
    command = [str(ROOT / "scripts" / "gpu_check"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


@needs_mpiexec
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("private", "some"),
    [pytest.param("0", "test", marks=pytest.mark.full), ("1", "stream")],
    ids=["both ways", "staged"],
)
def test_it_all_runs(private, some):
    done = gpu_check("--ranks", "2", "--sizes", "4K", "--", "tests/gpu", "-k", some, STANDIN_PRIVATE=private)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CuPy stand-in on stand-in for a GPU" in done.stdout
    assert "failed" not in done.stdout and " passed" in done.stdout
    assert "4096 CuPy, staged" in done.stdout


def test_what_is_missing(tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('hidden')")
    done = gpu_check(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "has no cupy; nothing is installed here" in done.stderr


def test_an_argument_that_it_does_not_know():
    done = gpu_check("--rank", "2", MPIEXEC=MPIEXEC or "none")
    assert done.returncode == 1 and "scripts/gpu_check: " in done.stderr
