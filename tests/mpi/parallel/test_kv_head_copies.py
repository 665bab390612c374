"""Training of models with fewer key/value heads than ranks of tp: the bits of one rank, copies, memory, checkpoints."""

import numpy as np
import pytest
from support.training_states import differing, whole

from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.memory_ledger import Workload
from parallel.engine.settings import Settings
from parallel.nn.gated import gated_transformer
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.operator import ArraySpec
from parallel.nn.placement import Copies
from parallel.optim.optimizers import AdamW
from parallel.runtime.consistency_check import ParameterMismatch
from parallel.sharding.mesh import Mesh
from parallel.trainer.engine import Engine

TOKENS, CONTEXT, HEADS, WIDTH, PARTS = 37, 8, 8, 32, 4


def model(kv_heads):
    return gated_transformer(TOKENS, CONTEXT, 1, HEADS, WIDTH, kv_heads=kv_heads, dropout=0.1)


def options(**settings):
    return Settings(**{"first_bytes": 1, "bucket_bytes": 5000, "clip": 0.3, "check_every": 1, **settings})


def engine(comm, kv_heads, **settings):
    return DataParallelEngine(model(kv_heads), SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), options(**settings))


def batches(numbers, step):
    for number in numbers:
        x, y = np.random.default_rng([step, number]).integers(0, TOKENS, (2, 2, CONTEXT))
        yield number, x, y, np.arange(2) + 2 * number


def shapes(samples):
    return tuple(ArraySpec((samples, CONTEXT), np.dtype(np.int64)) for _ in range(2))


def train(comm, kv_heads, **settings):
    """Losses and norms of two steps, and the state; the memory is as forecast."""
    with engine(comm, kv_heads, **settings) as made:
        found = [made.step(list(batches(made.share(PARTS), step))) for step in range(2)]
        assert made.ledger.allocated == made.ledger.predicted
        workload = Workload(comm.Get_rank(), comm.Get_size(), shapes, [(2,) * PARTS])
        forecast = DataParallelEngine.forecast(
            model(kv_heads), SoftmaxCrossEntropy(), AdamW(rate=0.01), workload, options(**settings)
        )
        assert forecast.predicted == made.ledger.predicted
        assert forecast.work == made.ledger.work
        return [(one.loss, one.norm) for one in found], whole(comm, made)


def meshes(ranks):
    """Meshes on which each rank has a power of two of as many logical shards as there are ranks, or all."""
    for tensor in range(2, ranks + 1):
        if ranks % tensor == 0 and not (each := ranks // tensor) & (each - 1):
            yield f"dp={ranks // tensor},tp={tensor}"


SLOW = pytest.mark.full


@pytest.mark.parametrize(
    ("layout", "precision", "kv_heads"),
    [
        ("dp", "fp32", 1),
        *(pytest.param("dp", precision, 2, marks=SLOW) for precision in ("fp32", "bf16")),
        *(pytest.param(layout, "bf16", 1, marks=SLOW) for layout in ("zero1", "zero2", "zero3")),
        pytest.param("zero3", "fp32", 4, marks=SLOW),
    ],
)
@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=SLOW)])
def test_the_same_bits_on_any_mesh(comm, layout, precision, kv_heads, sequence):
    shared = {"precision": precision, "reproducible": True, "tensor_shards": comm.Get_size()}
    shared["sequence_parallel"] = sequence and CONTEXT % comm.Get_size() == 0
    expected, state = train(comm, kv_heads, **shared)
    for mesh in meshes(comm.Get_size()):
        found, same = train(comm, kv_heads, layout=layout, mesh=mesh, **shared)
        assert found == expected
        assert differing(state, same) == []


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_each_rank_has_its_copy_only(comm, kv_heads):
    """The weights of a rank: its query heads, and one key/value head if the ranks are more than these."""
    ranks = comm.Get_size()
    with engine(comm, kv_heads, mesh=f"tp={ranks}") as made:
        held = [one for one in made.flat.places if one.parameter.name.startswith("1.0.inner.1.")]
        found = sum(one.size for one in held) // (WIDTH * WIDTH // HEADS)
        if ranks > kv_heads:
            queries = comm.allgather(found - 2)
            assert sum(queries) == HEADS and max(queries) <= -(-HEADS // kv_heads // max(ranks // kv_heads, 1))
        else:
            assert sum(comm.allgather(found)) == HEADS + 2 * kv_heads


def test_copies_are_compared(comm):
    ranks = comm.Get_size()
    with engine(comm, 1, mesh=f"tp={ranks}") as made:
        made.step(list(batches(made.share(PARTS), 0)))
        if ranks == 1:
            return
        if comm.Get_rank() == ranks - 1:
            held = [one.parameter for one in made.flat.places if one.parameter.name == "1.0.inner.1.weight"]
            (shared,) = (one for one in held if isinstance(one.placement, Copies))
            shared.data[3] += 0.5
        with pytest.raises(ParameterMismatch, match=r"after step 1 parameter .* of rank"):
            made.step(list(batches(made.share(PARTS), 1)))


@pytest.mark.full
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_checkpoints_continue_on_other_meshes(comm, folder, kv_heads):
    """Every hop makes the step of an engine that goes on without: files have one copy."""
    ranks = comm.Get_size()
    shared = {"reproducible": True, "tensor_shards": ranks, "micro_batch": 1, "check_every": 1}
    runs = [
        {},
        *({"mesh": mesh, "layout": layout} for mesh, layout in zip(meshes(ranks), ("zero1", "dp", "zero3"))),
        {},
    ]
    assert ranks == 1 or Mesh.parse(runs[1]["mesh"]).sizes["tp"] > 1

    def made_with(run):
        return Engine(model(kv_heads), SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), Settings(**shared, **run))

    with made_with({}) as alone:
        for number, run in enumerate(runs):
            with made_with(run) as made:
                if number:
                    made.load(folder / "checkpoints")
                x, y = np.random.default_rng(number).integers(0, TOKENS, (2, ranks, CONTEXT))
                report, same = made.step(x, y), alone.step(x, y)
                assert (report.loss, report.norm) == (same.loss, same.norm)
                assert differing(whole(comm, made.inner), whole(comm, alone.inner)) == []
                made.save(folder / "checkpoints")
