"""What only reads an engine changes nothing: steps with and without readings in between have equal bits."""

from pathlib import Path

import numpy as np
import pytest
from conformance.thread_communicator import run_threads
from support.differential.columns import COLUMNS, Column
from support.differential.rules import trainable
from support.differential.tasks import GPT, MIXTURE, MLP
from support.tiers import default

from parallel import SGD, AdamW, ArrayDataset, Engine, StepFailed

COMPRESSORS = ("int8", "int4", "qsgd:6", "terngrad", "sign", "topk:0.1", "powersgd:1")
MESHES = (
    *(Column(2, {"layout": layout}) for layout in ("dp-naive", "dp-bucket", "dp")),
    *(Column(4, {"mesh": mesh}) for mesh in ("dp=2,tp=2", "cp=2,tp=2", "dp=2,cp=2")),
    Column(4, {"layout": "pp:1f1b", "mesh": "pp=2,dp=2"}),
    Column(2, {"layout": "pp:dualpipe", "mesh": "pp=2"}),
)
"""Layouts in which every rank has the whole sum of gradients."""

COMPRESSED = [(column, how) for column in MESHES for how in COMPRESSORS]
AVERAGING = ("local", "group")
"""Layouts that have one state of all replicas in checkpoints, from which all ranks continue."""

PRECISIONS = ("fp32", "bf16")
PLAIN = [(column, PRECISIONS[at % 2]) for at, column in enumerate(one for one in COLUMNS if one.threads)]


def readings(engine, task, folder):
    """Everything that returns or writes something about a training."""
    inner = engine.inner
    engine.state_dict()
    if engine.optimizer.ema:
        engine.state_dict(ema=True)
        engine.evaluate(*task.batch(50, 8), ema=True)
    engine.evaluate(*task.batch(51, 8))
    if engine.settings.layout not in AVERAGING:
        engine.save(folder)
        inner.state(), list(inner.tensor_slices())
    for name in ("steps", "updates", "ledger", "events", "is_reporter", "remarks"):
        str(getattr(engine, name))
    engine.optimizer.describe(), engine.optimizer.states(), inner.share(3)
    for parameter in engine.model.parameters():
        repr(parameter), parameter.has_values and parameter.data.sum()


def task_of(column):
    return next(task for task in (MIXTURE, GPT, MLP) if trainable(task, column))


def run(comm, column, how, folder, reads):
    """Loss of each step, and the state after them."""
    task, settings = task_of(column), {"precision": "fp32", "micro_batch": 2, "batch": 8, **column.settings}
    settings |= {"precision": how} if how in PRECISIONS else {"compress": how}
    optimizer = (
        SGD(lr=0.05, momentum=0.9) if column.kind == "federated" or how not in PRECISIONS else AdamW(lr=0.01, ema=0.8)
    )
    with Engine(task.model(), task.loss(), comm, optimizer, **settings) as engine:
        found = []
        for number in range(4):
            x, y = task.batch(number, column.samples)
            if column.kind == "federated":
                found.append(engine.step(next(iter(engine.batches(ArrayDataset(x, y))))).loss)
            else:
                found.append(engine.step(x, y).loss)
            if reads:
                readings(engine, task, Path(folder))
        return found, engine.state_dict()


def same(one, other):
    return one[0] == other[0] and all(np.array_equal(one[1][name], other[1][name]) for name in other[1])


def name_of(cell):
    return " ".join(map(str, cell))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cell", default([*COMPRESSED, *PLAIN], *COMPRESSED[::6], *PLAIN[::6]), ids=name_of)
def test_readings_change_nothing(cell, tmp_path):
    column, how = cell
    plain, read = (
        run_threads(column.ranks, lambda comm, reads=reads: run(comm, column, how, tmp_path / "saved", reads))
        for reads in (False, True)
    )
    assert all(map(same, read, plain))


@pytest.mark.parametrize("how", COMPRESSORS)
def test_a_step_that_fails_leaves_what_compression_keeps(how):
    """Before its passes, as with data that cannot be loaded, or after them."""

    def train(comm, fails):
        model, loss = MLP.model(), MLP.loss()
        with Engine(model, loss, comm, SGD(lr=0.05), layout="dp", compress=how, precision="fp32") as engine:
            for number in range(4):
                if fails and number:
                    x, y = MLP.batch(number, 8)
                    with pytest.raises(StepFailed):
                        engine.step(x, y + (100 if comm.Get_rank() else 0) if number % 2 else np.zeros((8, 2)))
                engine.step(*MLP.batch(number, 8))
            return [engine.step(*MLP.batch(9, 8)).loss], engine.state_dict()

    plain, failed = (run_threads(2, lambda comm, fails=fails: train(comm, fails)) for fails in (False, True))
    assert all(map(same, failed, plain))
