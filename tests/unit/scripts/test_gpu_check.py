"""scripts/gpu_check on the stand-in for CuPy: every line of the tests for a GPU runs, and every line of the script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launches import MPIEXEC, needs_mpiexec

from collectives.cli import gpu_report

ROOT = Path(__file__).resolve().parents[3]
SHORT = ("--ranks", "2", "--sizes", "4K", "--bytes", "1M")


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
    ids=["direct too", "staged"],
)
def test_it_all_runs(tmp_path, private, some):
    done = gpu_check(*SHORT, "--out", str(tmp_path), "--", "tests/gpu", "-k", some, STANDIN_PRIVATE=private)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CuPy stand-in on stand-in for a GPU" in done.stdout
    assert "failed" not in done.stdout and " passed" in done.stdout
    assert "4096 CuPy, staged" in done.stdout and "4096 CuPy, pinned" in done.stdout
    steps = json.loads((tmp_path / "report.json").read_text())
    assert [(step["step"], step["status"]) for step in steps] == [
        (name, "0") for name in ("probe", "tests", "bandwidth")
    ]
    probes = {result["probe"]: result for result in steps[0]["probes"]}
    assert probes["transfer of GPU arrays"]["value"].startswith("pinned")
    assert not [result for result in probes.values() if "error" in result]
    page = (tmp_path / "report.md").read_text()
    assert "| tests | 2 | 0 |" in page and "copy from the neighbour's device memory" in page


def test_report_of_failures(tmp_path, capsys):
    (tmp_path / "steps.tsv").write_text("tests\t4\t1\t30\nbandwidth\t4\tno time\t0\nprobe\t4\t0\t5\n")
    (tmp_path / "tests-4.log").write_text(
        "E  cudaErrorMemoryAllocation: out of memory\nFAILED tests/gpu/a.py::test_a\n"
    )
    refused = {"probe": "event", "error": "rank 1: cudaErrorNotSupported", "cause": "no IPC"}
    (tmp_path / "probe-4.json").write_text(json.dumps({"ranks": 4, "probes": [refused]}))
    assert gpu_report.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "tests on 4 ranks: exit status 1\n    FAILED tests/gpu/a.py::test_a\n    likely cause: no memory" in printed
    assert "bandwidth on 4 ranks: exit status no time" in printed and "probe on" not in printed
    page = (tmp_path / "report.md").read_text()
    assert "rank 1: cudaErrorNotSupported (no IPC)" in page and "| bandwidth | 4 | no time | 0 |" in page
    (tmp_path / "steps.tsv").write_text("probe\t4\t0\t5\n")
    assert gpu_report.main([str(tmp_path)]) == 0


def test_what_is_missing(tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('hidden')")
    done = gpu_check(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "has no cupy; nothing is installed here" in done.stderr


def test_an_argument_that_it_does_not_know():
    done = gpu_check("--rank", "2", MPIEXEC=MPIEXEC or "none")
    assert done.returncode == 1 and "scripts/gpu_check: " in done.stderr
