"""Training on meshes with tensor parallelism: the same as data parallelism, in the same bits if reproducible."""

import numpy as np
import pytest
from support.training_states import differing, whole

from parallel.checkpoint import checkpoint_files
from parallel.checkpoint.checkpoint_files import Checkpoint
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.flat_params import FlatParams
from parallel.nn.loss import MSE, SoftmaxCrossEntropy
from parallel.nn.models import mlp, transformer
from parallel.optim.optimizers import AdamW
from parallel.sharding.mesh import Mesh
from parallel.trainer.engine import Engine

TOKENS, CONTEXT, HEADS, PARTS, STEPS = 37, 6, 9, 5, 2


def gpt():
    return transformer(TOKENS, CONTEXT, 1, HEADS, 18, dropout=0.1)


def net():
    return mlp([8, 12, 10], dropout=0.2)


def batches(numbers, step, model=gpt):
    """Micro-batches of these numbers."""
    for number in numbers:
        random = np.random.default_rng([step, number])
        shape = (3, CONTEXT)
        x, y = random.integers(0, TOKENS, shape), random.integers(-3, TOKENS, shape)
        if model is net:
            x, y = random.normal(size=(3, 8)), random.normal(size=(3, 10))
        yield number, x, y, np.arange(3) + 3 * number


def engine(comm, model=gpt, **settings):
    loss = MSE() if model is net else SoftmaxCrossEntropy()
    settings = Settings(**{"first_bytes": 1, "bucket_bytes": 5000, "clip": 0.3, "check_every": 1, **settings})
    return DataParallelEngine(model(), loss, comm, AdamW(rate=0.01), settings)


def train(comm, model=gpt, **settings):
    """Losses and norms of some steps, an evaluation, and the state; checks the memory ledger."""
    with engine(comm, model, **settings) as made:
        reports = [made.step(list(batches(made.share(PARTS), step, model))) for step in range(STEPS)]
        measure = SoftmaxCrossEntropy().correct if model is gpt else None
        score = made.evaluate(list(batches(made.share(PARTS), STEPS, model)), measure)
        assert made.ledger.allocated == made.ledger.predicted
        return [(report.loss, report.norm) for report in reports], score, whole(comm, made)


def meshes(ranks):
    """All meshes of so many ranks, in both orders of the axes."""
    for tensor in range(2, ranks + 1):
        if ranks % tensor == 0:
            yield from dict.fromkeys([f"dp={ranks // tensor},tp={tensor}", f"tp={tensor},dp={ranks // tensor}"])


@pytest.mark.parametrize("layout", ["dp", "dp-naive", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("model", [gpt, net])
def test_a_mesh_trains_as_replicas_do(comm, layout, model):
    expected, score, state = train(comm, model)
    for mesh in meshes(comm.Get_size()):
        parts = model is gpt and CONTEXT % Mesh.parse(mesh).sizes["tp"] == 0
        found, same_score, same_state = train(comm, model, layout=layout, mesh=mesh, sequence_parallel=parts)
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        assert same_score.loss == pytest.approx(score.loss, rel=1e-4) and same_score.measure == score.measure
        assert state.keys() == same_state.keys()
        for name, tensor in state.items():
            np.testing.assert_allclose(same_state[name], tensor, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("layout", ["dp", "zero1", "zero3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [gpt, net])
def test_the_same_bits_on_any_mesh(comm, layout, precision, model):
    shared = {"precision": precision, "reproducible": True, "tensor_shards": comm.Get_size()}
    expected, score, state = train(comm, model, **shared)
    for mesh in meshes(comm.Get_size()):
        tensor = Mesh.parse(mesh).sizes["tp"]
        if (each := comm.Get_size() // tensor) & (each - 1):
            continue
        found = train(comm, model, layout=layout, mesh=mesh, **shared)
        assert found[:2] == (expected, score)
        assert differing(state, found[2]) == []


def test_checkpoints_of_any_mesh(comm, folder):
    """Whole, then on every mesh in turn, each from the checkpoint of the one before; the whole again at the end."""
    ranks = comm.Get_size()
    shared = {"reproducible": True, "tensor_shards": ranks}
    layouts = ["zero1", "zero3", "dp", "zero2"]
    runs = [{}, *({"mesh": mesh, "layout": layouts[at % 4]} for at, mesh in enumerate(meshes(ranks))), {}]
    if ranks == 3:
        runs = [{}, {"mesh": "tp=3", "layout": "zero3"}, {"layout": "zero3"}]
    with engine(comm, **shared) as alone:
        for step, run in enumerate(runs):
            with engine(comm, **shared, **run) as made:
                if step:
                    found = Checkpoint(comm, folder / checkpoint_files.name_of(step))
                    found.restore(made.tensor_slices())
                    made.load(found.facts["engine"])
                    made.refresh()
                report = made.step(list(batches(made.share(PARTS), step)))
                same = alone.step(list(batches(alone.share(PARTS), step)))
                assert (report.loss, report.norm) == (same.loss, same.norm)
                assert differing(whole(comm, made), whole(comm, alone)) == []
                slices, facts = made.tensor_slices(), {"engine": made.state()}
                checkpoint_files.save(comm, folder, step + 1, slices, facts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pool": True}, "pool: True is not for operators that are cut"),
    ],
)
def test_what_does_not_go_together(comm, settings, message):
    ranks = comm.Get_size()
    shards = settings.get("tensor_shards", 2) * ranks
    with pytest.raises(ValueError, match=message):
        engine(comm, mesh=f"tp={ranks}", **{**settings, "tensor_shards": shards})


def test_a_mesh_that_does_not_fit(comm):
    with pytest.raises(ValueError, match="would fit"):
        engine(comm, mesh=f"dp=2,tp={comm.Get_size()}")
    with pytest.raises(ValueError, match=r"expected ep to be a divisor of the . ranks along"):
        engine(comm, mesh=f"tp={comm.Get_size()},ep=11")


def test_whole_tensors_of_an_engine(comm):
    """Weights of the whole model go to a mesh, and come back."""
    ranks = comm.Get_size()
    with Engine(gpt(), SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), Settings(mesh=f"tp={ranks}")) as made:
        first = made.state_dict()
        flat = FlatParams(model := gpt())
        assert {name: values.shape for name, values in first.items()} == {p.name: p.shape for p in model.parameters()}
        for name, values in first.items():
            np.testing.assert_array_equal(values, flat.by_name[name].parameter.first(0).astype(np.float32))
        other = {
            name: values + np.arange(values.size, dtype="f4").reshape(values.shape) for name, values in first.items()
        }
        made.load_state_dict(other)
        for name, values in made.state_dict().items():
            np.testing.assert_array_equal(values, other[name])
