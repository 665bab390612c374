"""Early stop, plateau, best checkpoints and dropped last batches of `chorus train`: on several ranks as on one."""

import csv
import json
import shutil
from unittest import mock

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("threadpoolctl")

from mpi4py import MPI

from parallel.checkpoint.checkpoint_files import all_in
from parallel.cli import train
from parallel.trainer.trainer import Training

pytestmark = [pytest.mark.timeout(200), pytest.mark.ranks(2, 3)]

TASK = "--data teacher_classes --model mlp:small --batch 600 --micro-batch 100 --threads 1 --reproducible"
DECISIONS = {
    "early stop": "--steps 60 --rate 0.3 --warm-up 0 --early-stop 2 --test-every 1",
    "plateau": "--steps 30 --rate 0.3 --warm-up 0 --plateau 1 --plateau-factor 0.5 --test-every 2",
    "best": "--steps 20 --rate 0.3 --warm-up 0 --keep-best 2 --keep 1 --test-every 3",
    "drop last": "--epochs 3 --drop-last --test-every 4",
}


def trained(comm, folder, *words):
    """Losses and learning rates by step, checkpoints, and what this rank has observed, of a training on `comm`."""
    observed, observe = [], Training.observe

    def spy(training, score):
        ends = observe(training, score)
        observed.append(
            (training.done, score.loss, ends, {name: one.state() for name, one in training._watched.items()})
        )
        return ends

    files = ["--checkpoint", folder / "c", "--csv", folder / "m.csv"]
    with mock.patch.object(MPI, "COMM_WORLD", comm), mock.patch.object(Training, "observe", spy):
        assert train.main([str(word) for word in (*TASK.split(), *words, *files)]) == 0
        comm.Barrier()
    rows = [
        tuple(row[name] for name in ("step", "rate", "loss", "test_loss", "final"))
        for row in csv.DictReader((folder / "m.csv").read_text().splitlines())
    ]
    return rows, [path.name for path in all_in(folder / "c")], observed


@pytest.mark.parametrize("layout", ["dp", "zero3", "pp:1f1b"])
@pytest.mark.parametrize("name", DECISIONS)
def test_as_on_one_rank(world, folder, name, layout):
    words = DECISIONS[name].split()
    here = ["--layout", layout]
    alone = trained(MPI.COMM_SELF, folder / f"alone-{world.rank}", *words)
    together = trained(world, folder / "together", *words, *here)
    assert together == alone
    rows, kept, observed = alone
    if name == "early stop":
        assert 6 < int(rows[-1][0]) < 60 and observed[-1][2]
    elif name == "plateau":
        assert len({rate for _, rate, *_ in rows}) > 2
    elif name == "best":
        losses = {step: loss for step, loss, *_ in observed}
        best = sorted(sorted(losses, key=losses.get)[:2] + [20])
        assert [int(one.rpartition("-")[2]) for one in kept] == sorted(set(best))
    else:
        assert int(rows[-1][0]) == 3 * (4096 // 600)
    assert world.allgather(json.dumps(observed)) == [json.dumps(observed)] * world.size


@pytest.mark.parametrize("layout", ["dp", "zero3", "pp:1f1b"])
@pytest.mark.parametrize("name", ["early stop", "plateau", "best"])
def test_a_resumed_training_decides_as_one_without_a_break(world, folder, name, layout):
    """From a checkpoint written on one rank in the middle."""
    words = DECISIONS[name].split()
    here = ["--layout", layout]
    whole = trained(MPI.COMM_SELF, folder / f"alone-{world.rank}", *words, "--every", 5, "--keep", 99)
    if world.rank == 0:
        (folder / "resumed").mkdir()
        (found,) = [path for path in all_in(folder / "alone-0/c") if path.name.endswith("05")]
        shutil.copytree(found, folder / "resumed/c" / found.name)
    world.Barrier()
    words += ["--every", 5, "--keep", 99, "--resume"]
    rows, kept, observed = trained(world, folder / "resumed", *words, *here)
    assert rows == [row for row in whole[0] if int(row[0]) > 5]
    assert observed == [one for one in whole[2] if one[0] > 5]
    assert kept == [one for one in whole[1] if one >= kept[0]]
