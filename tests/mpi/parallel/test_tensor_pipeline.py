"""Pipelines whose stages are cut over the ranks of an axis: the same bits as one rank, in every schedule."""

import numpy as np
import pytest
from support.training_states import differing, whole

from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.memory_ledger import Workload
from parallel.engine.settings import Settings
from parallel.nn.loss import MSE, SoftmaxCrossEntropy
from parallel.nn.models import mlp, transformer
from parallel.nn.operator import ArraySpec
from parallel.optim.optimizers import AdamW
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.sharding.mesh import Mesh
from parallel.trainer.strategies import strategy_of

TOKENS, CONTEXT, HEADS, PARTS, STEPS = 37, 12, 4, 8, 2
FEW = ("1f1b", "zb-v")
"""Schedules of the default tests."""
SYNCHRONOUS = [
    pytest.param(name, marks=[] if name in FEW else pytest.mark.full)
    for name, entry in SCHEDULES.items()
    if entry.version is None
]
REPLICAS = [
    pytest.param(name, marks=[] if name == "zero1" else pytest.mark.full)
    for name, layout in LAYOUTS.items()
    if layout.across_stages
]


def gpt():
    return transformer(TOKENS, CONTEXT, 6, HEADS, 16, dropout=0.1)


def net():
    return mlp([8, 12, 9, 8, 7, 6, 8, 10], dropout=0.2)


def batches(numbers, step, model):
    for number in numbers:
        random = np.random.default_rng([step, number])
        x, y = random.integers(0, TOKENS, (2, CONTEXT)), random.integers(-3, TOKENS, (2, CONTEXT))
        if model is net:
            x, y = random.normal(size=(2, 8)), random.normal(size=(2, 10))
        yield number, x, y, np.arange(2) + 2 * number


def loss_of(model):
    return MSE() if model is net else SoftmaxCrossEntropy()


def train(comm, model, **settings):
    """Losses and norms of some steps, an evaluation, and the state; checks the memory ledger."""
    settings = Settings(**{"clip": 0.3, "check_every": 1, "first_bytes": 1, "reproducible": True, **settings})
    engine_class = strategy_of(settings).engine_class(settings)
    with engine_class(model(), loss_of(model), comm, AdamW(rate=0.01), settings) as made:
        reports = [made.step(list(batches(made.share(PARTS), step, model))) for step in range(STEPS)]
        measure = SoftmaxCrossEntropy().correct if model is gpt else None
        score = made.evaluate(list(batches(made.share(PARTS), STEPS, model)), measure)
        assert made.ledger.allocated == made.ledger.predicted
        state = whole(comm, made)
        if settings.layout != "dp":
            expect_forecast(comm, model, settings, made)
        return [(report.loss, report.norm) for report in reports], score, state


def expect_forecast(comm, model, settings, made):
    x, y = ((2, 8), (2, 10)) if model is net else ((2, CONTEXT),) * 2
    kinds = (np.dtype("f4"),) * 2 if model is net else (np.dtype(np.int64),) * 2
    forms = ArraySpec(x, kinds[0]), ArraySpec(y, kinds[1])
    workload = Workload(comm.Get_rank(), comm.Get_size(), lambda samples: forms, [(2,) * PARTS])
    ledger = Pipeline.forecast(model(), loss_of(model), AdamW(rate=0.01), workload, settings)
    assert ledger.predicted == made.ledger.predicted


def meshes(ranks, replicas):
    """All meshes of so many ranks; ``tp`` is a power of two or all ranks, so that the bits can be the same."""
    for tensor in range(1, ranks + 1):
        if ranks % tensor == 0 and (ranks // tensor) & (ranks // tensor - 1) == 0:
            for stages in range(1, ranks // tensor + 1):
                if ranks // tensor % stages == 0:
                    yield f"pp={stages},{replicas}={ranks // tensor // stages},tp={tensor}"


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_the_same_bits_in_every_schedule(comm, schedule):
    ranks = comm.Get_size()
    shared = {"tensor_shards": ranks}
    expected, score, state = train(comm, net, **shared)
    fits = [mesh for mesh in meshes(ranks, "dp") if Mesh.parse(mesh).sizes["pp"] in (1, 2)]
    for mesh in fits:
        options = {"mesh": mesh, "microbatches": PARTS // Mesh.parse(mesh).sizes["dp"]}
        found = train(comm, net, layout=f"pp:{schedule}", **options, **shared)
        assert found[:2] == (expected, score), mesh
        assert differing(state, found[2]) == [], mesh


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_same_bits_of_a_transformer(comm, replicas, precision, sequence):
    ranks = comm.Get_size()
    shared = {"tensor_shards": ranks, "precision": precision, "sequence_parallel": sequence}
    expected, score, state = train(comm, gpt, **shared)
    for mesh in meshes(ranks, replicas):
        microbatches = PARTS // Mesh.parse(mesh).sizes[replicas]
        found = train(comm, gpt, layout="pp:zb-h1", mesh=mesh, microbatches=microbatches, **shared)
        assert found[:2] == (expected, score), mesh
        assert differing(state, found[2]) == [], mesh


def test_a_mesh_that_does_not_fit(comm):
    ranks = comm.Get_size()
    with pytest.raises(ValueError, match="would fit"):
        train(comm, net, layout="pp:1f1b", mesh=f"pp=2,tp={ranks}", microbatches=8)
    with pytest.raises(ValueError, match=r"expected axes of pp, .*, tp, ep, etp, found sp"):
        train(comm, net, layout="pp:1f1b", mesh=f"pp=1,sp={ranks}", microbatches=8)
