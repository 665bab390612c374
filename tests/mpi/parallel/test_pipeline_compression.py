"""Compressed gradients of the replicas of a pipeline's stages: exact with all elements, learning, and restarts."""

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from support import tiny_models
from support.training_states import differing, whole

from parallel.checkpoint import checkpoint_files
from parallel.checkpoint.checkpoint_files import Checkpoint
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.optim.optimizers import SGD
from parallel.pipeline.pipeline_engine import Pipeline

RANKS = MPI.COMM_WORLD.Get_size()
MESHES = [f"pp={stages},{{}}={RANKS // stages}" for stages in (1, 2, RANKS) if RANKS % stages == 0]
meshes = pytest.mark.parametrize("mesh", sorted(set(MESHES)))


def engine(comm, mesh, compress, layout="dp", schedule="1f1b", **settings):
    """Of a model whose first matrix is also its last: with several stages they all sum it, in several buckets."""
    settings = {"first_bytes": 1, "bucket_bytes": 2000, "microbatches": 8, **settings}
    settings = Settings(layout=f"pp:{schedule}", mesh=mesh.format(layout), compress=compress, **settings)
    model = tiny_models.model(depth=2 * comm.size)
    return Pipeline(model, tiny_models.Squares(), comm, SGD(rate=0.05, momentum=0.9), settings)


def train(made, steps):
    return [made.step(tiny_models.batches(made.share(8), 0)).loss for _ in range(steps)]


def owed(comm, made):
    """Sum of all ranks' residuals, by parameter."""
    mine = [
        (
            place.parameter.name,
            reducer.residual[place.span.start - reducer.bucket.span.start :][: place.size].astype("f8"),
        )
        for reducer in made._compressed()
        for place in reducer.bucket.places
    ]
    total = {}
    for name, values in (pair for some in comm.allgather(mine) for pair in some):
        total[name] = total.get(name, 0) + values
    return total


@meshes
@pytest.mark.parametrize("layout", ["dp", "dp-naive"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe"])
def test_all_elements_sent_is_plain_training(comm, mesh, layout, schedule):
    with (
        engine(comm, mesh, "topk:1", layout, schedule) as made,
        engine(comm, mesh, "none", layout, schedule) as plain,
    ):
        np.testing.assert_allclose(train(made, 6), train(plain, 6), rtol=1e-5)


@meshes
@pytest.mark.parametrize("compress", ["int8", "sign", "powersgd:1", "qsgd:6"])
def test_it_learns_and_copies_stay_the_same(comm, mesh, compress):
    with engine(comm, mesh, compress, check_every=1) as made:
        losses = train(made, 20)
        assert losses[-1] < 0.8 * losses[0]
        assert made.ledger.predicted == made.ledger.allocated


@meshes
def test_a_restart_goes_on_bit_for_bit_and_other_layouts_owe_as_much(comm, mesh, tmp_path_factory):
    folder = comm.bcast(str(tmp_path_factory.mktemp("here")))
    with engine(comm, mesh, "int4") as made:
        train(made, 3)
        path = checkpoint_files.save(comm, Path(folder), 3, made.tensor_slices(), {"engine": made.state()})
        due = owed(comm, made)
        losses, state = train(made, 3), whole(comm, made)

    def restored(other):
        found = Checkpoint(comm, path)
        found.restore(other.tensor_slices())
        other.load(found.facts["engine"])
        other.refresh()

    with engine(comm, mesh, "int4") as again:
        restored(again)
        assert train(again, 3) == losses
        weights = {name: values for name, values in whole(comm, again).items() if not name.startswith("feedback")}
        assert differing(weights, {name: state[name] for name in weights}) == []
    model, settings = tiny_models.model(depth=2 * comm.size), Settings(compress="int8")
    with DataParallelEngine(model, tiny_models.Squares(), comm, SGD(rate=0.05, momentum=0.9), settings) as other:
        restored(other)
        for name, values in owed(comm, other).items():
            np.testing.assert_allclose(values, due.get(name, 0), rtol=1e-5, atol=1e-7)


def test_what_cannot_be(comm):
    with pytest.raises(ValueError, match=r"every rank has the whole sum .* and the layout is zero1"):
        engine(comm, "pp=1,{}=" + str(comm.size), "int8", "zero1")
    with pytest.raises(ValueError, match="canonical order"):
        engine(comm, f"pp={comm.size}", "int8", reproducible=True)


def test_auto_declines_within_a_node(comm):
    if len(set(comm.nodes or (0,))) == 1:
        with engine(comm, f"pp={comm.size}", "auto") as made:
            assert made.remarks == ("compress auto: plain is quicker within a node",) and not made._compressed()
