"""Trainings on meshes with pp, cp and tp whose ranks are killed, interrupted or raise: under mpiexec."""

import pytest
from support.tiers import default

pytest.importorskip("safetensors")
pytest.importorskip("threadpoolctl")

from support.launched_training import KILLER, course, lines, run, same, start, stop_and_resume
from support.launches import ended, needs_mpiexec

from parallel.checkpoint.checkpoint_files import all_in
from parallel.sharding.mesh import Mesh

pytestmark = [needs_mpiexec, pytest.mark.timeout(400)]

TASK = ["--data", "copy", "--model", "gpt:tiny", "--length", "16", "--batch", "8", "--micro-batch", "2"]
TASK += ["--dropout", "0.1"]
OFTEN = ["--test-every", "5", "--test-samples", "16", "--threads", "1"]  # not in checkpoints

MESHES = {
    "tp=2": [],
    "cp=2": [],
    "pp=2,tp=2": ["--parallel", "pp:1f1b"],
    "pp=2,cp=2": ["--parallel", "pp:zb-h1"],
    "zero1=2,pp=2,tp=2": ["--parallel", "pp:1f1b"],
    "pp=2,cp=2,tp=2": ["--parallel", "pp:1f1b"],
}
"""Options of a training by mesh."""


def on_mesh(mesh):
    """Number of ranks, and arguments of a training that checkpoints keep."""
    return Mesh.parse(mesh).size, [*TASK, "--mesh", mesh, *MESHES[mesh]]


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_a_killed_rank_ends_all_and_the_training_goes_on_bit_for_bit(tmp_path, mesh):
    """The last rank is killed after step 7; files of step 4 continue as if nothing had been."""
    ranks, task = on_mesh(mesh)
    task += [*OFTEN, "--steps", 10, "--every", 4]
    run(*task, "--checkpoint", tmp_path / "a", "--json", tmp_path / "a.jsonl", ranks=ranks)
    keep = ["--checkpoint", tmp_path / "b", "--json", tmp_path / "b.jsonl"]
    process = start(ranks - 1, 7, *task, *keep, ranks=ranks, program=("-c", KILLER))
    ended(process)
    assert process.returncode != 0
    assert all_in(tmp_path / "b")[-1].name == "step-000000004"
    output = run(*keep, "--resume", *OFTEN, ranks=ranks)
    assert f"step-000000004: 4 steps were made, on {ranks} ranks" in output
    assert course(tmp_path / "b.jsonl") == course(tmp_path / "a.jsonl")
    assert same(all_in(tmp_path / "b")[-1], all_in(tmp_path / "a")[-1])


@pytest.mark.full
@pytest.mark.parametrize("way", ["chorus -n, SIGINT", "mpiexec, SIGINT"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_signal_ends_all_ranks_after_the_same_step(tmp_path, mesh, way):
    ranks, task = on_mesh(mesh)
    stop_and_resume(way, ranks, task, OFTEN, tmp_path)


RAISER = """
import sys
from mpi4py import MPI
from parallel.cli import train
from parallel.nn.norm import LayerNorm

forward, victim, calls = LayerNorm.forward, int(sys.argv.pop(1)), [0]

def raising(self, x, run):
    calls[0] += run.training
    if calls[0] == 20 and MPI.COMM_WORLD.Get_rank() == victim:
        raise ValueError("it is broken")
    return forward(self, x, run)

LayerNorm.forward = raising
from collectives.cli import launcher
launcher.run(train.main)
"""


@pytest.mark.parametrize("mesh", default(MESHES, "tp=2"))
@pytest.mark.parametrize("victim", default(["first", "last"], "last"))
def test_an_operator_that_raises_ends_all_ranks_with_one_message(tmp_path, mesh, victim):
    ranks, task = on_mesh(mesh)
    rank = ranks - 1 if victim == "last" else 0
    keep = ["--json", tmp_path / "m.jsonl"]
    process = start(rank, *task, *OFTEN, "--steps", 1000, *keep, ranks=ranks, program=("-c", RAISER))
    output = ended(process)
    assert process.returncode != 0
    assert output.count(f"nothing was updated; rank {rank}: ValueError: it is broken") == 1, output
    assert "Traceback" not in output and len(lines(tmp_path / "m.jsonl")) < 20, output
