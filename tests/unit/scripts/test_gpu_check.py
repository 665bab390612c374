"""scripts/gpu_check on the stand-in for CuPy: every line of the tests for a GPU runs, and every line of the script."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gpu_bandwidth
import gpu_report
import gpu_training
import numpy as np
import pytest
from mpi4py import MPI
from recipes import first_model
from support.launches import MPIEXEC, needs_mpiexec

from collectives import Communicator
from parallel.data.sampler import Batch
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.optim.optimizers import AdamW

ROOT = Path(__file__).resolve().parents[3]
TRAINING = ("--models", "gpt:tiny", "--precision", "fp32", "--batch", "2", "--length", "16", "--seconds", "0")
SHORT = ("--ranks", "2", "--sizes", "4K", "--bytes", "1M", *TRAINING)


def gpu_check(*arguments, **environment):
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_", "PYTEST_"))},
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT / "tests" / "support" / "standin"),
        **({"MPIEXEC": MPIEXEC} if MPIEXEC else {}),
        **environment,
    }
    command = [str(ROOT / "scripts" / "gpu_check"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=460)


SETTINGS = {
    "direct too": pytest.param({"STANDIN_PRIVATE": "0"}, "test", marks=pytest.mark.full),
    "staged": pytest.param({}, "persistent_again", marks=pytest.mark.full),
    "kernels": ({"STANDIN_ENGINE": "1"}, "persistent_again"),
}


@needs_mpiexec
@pytest.mark.timeout(480)
@pytest.mark.parametrize(("environment", "some"), SETTINGS.values(), ids=SETTINGS)
def test_it_all_runs(tmp_path, environment, some):
    done = gpu_check(*SHORT, "--out", str(tmp_path), "--", "tests/gpu", "-k", some, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CuPy stand-in on stand-in for an H100 GPU" in done.stdout
    assert "failed" not in done.stdout and " passed" in done.stdout
    steps = {step["step"]: step for step in json.loads((tmp_path / "report.json").read_text())}
    assert {name: step["status"] for name, step in steps.items()} == dict.fromkeys(
        ("probe", "training", "bandwidth", "tests"), "0"
    )
    expected = "kernel" if "STANDIN_ENGINE" in environment else "pinned"
    probes = {result["probe"]: result for result in steps["probe"]["results"]["probes"]}
    assert probes["transfer of GPU arrays"]["value"].startswith(expected)
    assert not [result for result in probes.values() if "error" in result]
    rows = {row["arrays"]: row for row in steps["bandwidth"]["results"]["rows"]}
    assert {"NumPy", "CuPy, staged", f"CuPy, {expected}"} <= rows.keys()
    assert rows["CuPy, pinned"]["broadcast_share"] > 0 and ("CuPy, exported" in rows) == (expected == "kernel")
    (model,) = steps["training"]["results"]["models"]
    assert model["model"] == "gpt:tiny" and model["sides"]["Chorus"]["MFU"] > 0
    page = (tmp_path / "report.md").read_text()
    assert "| tests | 2 | 0 |" in page and "copy from the neighbour's device memory" in page


def test_parts_have_every_test_once():
    def tests_of(part):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/gpu/test_quant.py"]
        done = subprocess.run([*command, "--gpu-part", part], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if "::" in line]

    every = tests_of("0/1")
    parts = [tests_of(f"{part}/2") for part in range(2)]
    assert every and sorted(test for part in parts for test in part) == sorted(every) and min(map(len, parts)) > 1


@needs_mpiexec
@pytest.mark.timeout(240)
def test_time_and_packages_that_are_missing(tmp_path):
    """Steps end with their time, here a training that would last ten minutes; tests without their packages are left
    out, and the report says so."""
    for name in ("cupy", "interprocess", "raw_kernels"):
        shutil.copy(ROOT / "tests" / "support" / "standin" / f"{name}.py", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib import util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'pytest_mpi' else find(name, *more)"
    )
    out = tmp_path / "out"
    done = gpu_check(*SHORT, "--seconds", "600", "--out", str(out), "--limit", "12", PYTHONPATH=str(tmp_path))
    steps = {step["step"]: step["status"] for step in json.loads((out / "report.json").read_text())}
    assert steps["tests"] == "left out: this Python has no pytest_mpi"
    assert steps["training"] in ("stopped", "no time")
    assert done.returncode == 1 and "tests on 2 ranks: left out: this Python has no pytest_mpi" in done.stdout
    assert "exit status stopped" in done.stdout or "exit status no time" in done.stdout


def test_report_of_failures(tmp_path, capsys):
    (tmp_path / "steps.tsv").write_text(
        "tests\t4\t1\t30\nbandwidth\t4\tno time\t0\nprobe\t4\t0\t5\ntraining\t1\t124\t9\n"
    )
    (tmp_path / "tests-4.log").write_text(
        "E  cudaErrorMemoryAllocation: out of memory\nFAILED tests/gpu/a.py::test_a\n"
    )
    (tmp_path / "training-1.log").write_text("below the goal: gpt:large: 0.5 of PyTorch's tokens/s\nlast line\n")
    refused = {"probe": "event", "error": "rank 1: cudaErrorNotSupported", "cause": "no IPC"}
    (tmp_path / "probe-4.json").write_text(json.dumps({"ranks": 4, "probes": [refused]}))
    assert gpu_report.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "tests on 4 ranks: exit status 1\n    FAILED tests/gpu/a.py::test_a\n    likely cause: no memory" in printed
    assert "bandwidth on 4 ranks: exit status no time" in printed and "probe on 4 ranks: exit" not in printed
    assert "training on 1 ranks: exit status stopped" in printed and "    last line" in printed
    assert "training on 1 ranks: below the goal: gpt:large" in printed
    page = (tmp_path / "report.md").read_text()
    assert "rank 1: cudaErrorNotSupported (no IPC)" in page and "| bandwidth | 4 | no time | 0 |" in page
    (tmp_path / "steps.tsv").write_text("bandwidth\t4\t0\t5\n")
    assert gpu_report.main([str(tmp_path)]) == 0
    assert "nothing failed, and all goals were reached" in capsys.readouterr().out


def test_goals_of_bandwidth():
    limits = gpu_bandwidth.Bounds(2, 2, 4e12, 50e9)
    long, short = gpu_bandwidth.LONG, gpu_bandwidth.SHORT
    assert limits.allreduce(gpu_bandwidth.KERNEL, long) == pytest.approx(2 * 2 * long / 4e12)
    assert limits.allreduce(gpu_bandwidth.PINNED, long) == pytest.approx(2 * long / 50e9)
    assert limits.broadcast(gpu_bandwidth.PINNED, long) == pytest.approx(long / 50e9)
    assert limits._replace(sharing=1).allreduce(gpu_bandwidth.KERNEL, long) == 0

    def missed(arrays, nbytes, *figures):
        return len(gpu_bandwidth.Row(nbytes, arrays, *figures).goals_missed)

    assert (
        missed(gpu_bandwidth.EXPORTED, long, 1, 0.69, 1, 1)
        == 1
        == missed(gpu_bandwidth.EXPORTED, short, 41e-6, 0, 1, 0)
    )
    assert (
        missed(gpu_bandwidth.EXPORTED, long, 1, 0.71, 1, 1)
        == 0
        == missed(gpu_bandwidth.EXPORTED, short, 39e-6, 0, 1, 0)
    )
    assert (
        missed(gpu_bandwidth.PINNED, long, 1, 1, 1, 0.79) == 1 and missed(gpu_bandwidth.PINNED, long, 1, 1, 1, 0.8) == 0
    )


def test_goals_of_training():
    made = {"model": "gpt:large", "precision": "bf16", "errors": [], "goals": []}
    ours, theirs = gpu_training.TrainingSpeed([5.0, 4.0], [70.0]), gpu_training.TrainingSpeed([5.01, 4.01], [100.0])
    gpu_training.judge(made, ours, theirs)
    assert made["ratio"] == 0.7 and len(made["goals"]) == 1 and not made["errors"]
    gpu_training.judge(made, ours, theirs._replace(losses=[5.0, 5.0], rates=[80.0]))
    assert len(made["goals"]) == 1 and len(made["errors"]) == 1


def test_peak_by_name():
    assert gpu_training.peak_of("NVIDIA H100 80GB HBM3", "bf16", None) == (989.5e12, "data sheet of h100")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_pytorch_side(precision):
    """On the host: PyTorch starts with the same loss and learns."""
    pytest.importorskip("torch")
    from torch_on_device import TorchOnDevice

    random = np.random.default_rng(0)
    batch = Batch(0, *random.integers(0, 256, (2, 4, 16)), np.arange(4))
    with DataParallelEngine(
        build("gpt:tiny", (16,), 256), SoftmaxCrossEntropy(), Communicator(MPI.COMM_SELF.Dup()), AdamW(rate=3e-4)
    ) as engine:
        expected = [engine.step([batch]).loss for _ in range(3)]
    side = TorchOnDevice(first_model("gpt:tiny", (16,), 256), AdamW(rate=3e-4), precision, "cpu")
    found = [side.step(batch.x, batch.y) for _ in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-5 if precision == "fp32" else gpu_training.TOLERANCE)


def test_what_is_missing(tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('hidden')")
    done = gpu_check(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "has no cupy (hidden); nothing is installed here" in done.stderr


def test_an_argument_that_it_does_not_know():
    done = gpu_check("--rank", "2", MPIEXEC=MPIEXEC or "none")
    assert done.returncode == 1 and "scripts/gpu_check: " in done.stderr
