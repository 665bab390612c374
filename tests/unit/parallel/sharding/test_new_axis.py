"""Another axis is a row of the table: meshes, engines, checkpoints, norms, ledger and planner take it from there."""

import numpy as np
import pytest
from conformance.thread_communicator import run_threads

from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import transformer
from parallel.nn.placement import Shard
from parallel.optim.optimizers import AdamW
from parallel.planning.measured.layout_choice import meshes
from parallel.sharding.axes import AXES
from parallel.sharding.axis import Axis
from parallel.sharding.mesh import Mesh
from parallel.trainer.engine import Engine

WORDS, LENGTH, STEPS = 13, 8, 2


@pytest.fixture
def another(monkeypatch):
    monkeypatch.setitem(AXES, "xp", Axis("xp", "more replicas", Shard(0)))


def trained(comm, mesh, folder, layout="dp", before=""):
    """Losses, norms and weights of some steps, perhaps from a checkpoint, on a mesh; and a checkpoint after them."""
    own = {"tensor_shards": 2, "sequence_parts": 2, "reproducible": True, "clip": 0.3, "check_every": 1}
    settings = Settings(mesh=mesh, layout=layout, batch=8, micro_batch=2, **own)
    model = transformer(WORDS, LENGTH, 2, 4, 8, dropout=0.1)
    with Engine(model, SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), settings) as engine:
        if before:
            engine.load(before)
        reports = []
        for step in range(engine.steps, engine.steps + STEPS):
            reports.append(engine.step(*np.random.default_rng(step).integers(0, WORDS, (2, 8, LENGTH))))
        if layout == "dp":
            assert engine.ledger.allocated == engine.ledger.predicted
        engine.save(folder)
        state = {name: value.tobytes() for name, value in engine.state_dict().items()}
        return [(report.loss, report.norm) for report in reports], state


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("xp=2", "dp"),
        ("dp=2,xp=2", "zero3"),
        ("xp=2,tp=2", "zero1"),
        ("cp=2,xp=2", "zero2"),
        ("pp=2,xp=2", "pp:1f1b"),
    ],
)
def test_training(another, tmp_path, mesh, layout):
    ranks = Mesh.parse(mesh).size
    (expected, *_) = run_threads(1, lambda comm: trained(comm, "dp=1", tmp_path / "one"))
    for found in run_threads(ranks, lambda comm: trained(comm, mesh, tmp_path / "mesh", layout)):
        assert found == expected
    (expected, *_) = run_threads(1, lambda comm: trained(comm, "dp=1", tmp_path / "end", before=tmp_path / "mesh"))
    for found in run_threads(ranks, lambda comm: trained(comm, mesh, tmp_path / "last", layout, tmp_path / "one")):
        assert found == expected


def test_planned_meshes(another):
    found = [str(mesh) for mesh in meshes(2, experts=False)]
    assert sorted(found) == ["cp=2", "dp=2", "tp=2", "xp=2"]
