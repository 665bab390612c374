"""The memory forecast of a training is its ledger after all steps, in every way to train, to the byte."""

import numpy as np
import pytest
from mpi4py import MPI
from support import tiny_models
from support.tiers import default

pytest.importorskip("safetensors")

from collectives import Communicator
from parallel.asynchronous.decentralized.styles import STYLES
from parallel.data.sampler import Batch
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.grad_compression import COMPRESSORS
from parallel.engine.memory_ledger import Workload
from parallel.engine.settings import Settings
from parallel.nn.operator import ArraySpec
from parallel.optim.optimizers import SGD, AdamW
from parallel.optim.precision import PRECISIONS
from parallel.pipeline.asynchronous_pipeline import AsynchronousPipeline
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.pipeline.stage_params import REPLICAS
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training

pytestmark = pytest.mark.ranks(3)

SAMPLES, BATCH = 23, 8
"""Three steps an epoch, the last of them of 7 samples: a rank's micro-batches are other leaves of the tree then."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = MPI.COMM_WORLD.bcast(str(tmp_path_factory.mktemp("data")))
    if MPI.COMM_WORLD.rank == 0:
        x = np.random.default_rng(0).normal(size=(SAMPLES, 40)).astype(np.float32)
        np.savez(f"{folder}/some.npz", x=x, y=np.arange(SAMPLES) % 3)
    MPI.COMM_WORLD.Barrier()
    return f"{folder}/some.npz"


def forecast_and_ledger(comm, data, **settings):
    """Both, after all steps of a training."""
    said = {"data": data, "model": "mlp:small", "batch": BATCH, "epochs": 1, "bucket_bytes": 1 << 16}
    with Training(complete(said | settings), comm) as made:
        list(made.run())
        return made.forecast, made.engine.ledger


def agree(forecast, ledger):
    """Whether the forecast is what the ledger expected and what was allocated."""
    assert forecast.predicted == ledger.predicted, f"{forecast.predicted} {ledger.predicted}"
    assert forecast.needed == ledger.needed
    assert forecast.predicted == ledger.allocated, f"{forecast.predicted} {ledger.allocated}"


MORE = [
    {},
    {"micro_batch": 3},
    {"reproducible": True, "micro_batch": 1},
    {"precision": "bf16", "optimizer": "sgd"},
    {"clip": 0.5, "steps": 1},
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_of_data_parallelism(comm, data, layout, more):
    agree(*forecast_and_ledger(comm, data, layout=layout, **more))


@pytest.mark.ranks(2)
def test_of_buckets_larger_than_the_first(comm, data):
    """With as many bytes in the first bucket as in the others there would be fewer of them, and a longer part."""
    agree(*forecast_and_ledger(comm, data, layout="zero1", model="mlp:medium", bucket_bytes=4 << 20, batch=23))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compress", COMPRESSORS)
def test_of_compressed_gradients(comm, data, compress):
    """What is owed, and what was owed before the step."""
    forecast, ledger = forecast_and_ledger(comm, data, compress=compress)
    agree(forecast, ledger)
    if COMPRESSORS[compress].feedback:
        assert forecast.predicted["buffers"] >= 2 * ledger.allocated["gradients"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("choice", ["none", "int8"])
def test_of_a_choice_made_here(comm, data, monkeypatch, choice):
    """It is made once, before the forecast, and told."""
    answers = iter([(choice, "so it was found")])
    monkeypatch.setattr("parallel.engine.compression.choose", lambda comm, count: next(answers))
    said = {"data": data, "model": "mlp:small", "batch": BATCH, "steps": 2, "compress": "auto"}
    with Training(complete(said), comm) as made:
        assert made.remarks == ("compress auto: so it was found",)
        assert made.settings.compress == "auto" and made.resolved.compress == choice
        list(made.run())
        agree(made.forecast, made.engine.ledger)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", [name for name, line in LAYOUTS.items() if line.drawn])
def test_of_micro_batches_that_are_drawn(comm, data, layout):
    """Any rank may have had the largest, or only the shortest; everything else is known."""
    forecast, ledger = forecast_and_ledger(comm, data, layout=layout, pool=True, micro_batch=3)
    expected, found = forecast.predicted, ledger.predicted
    assert found.pop("activations", 0) <= expected.pop("activations")
    assert found == expected


@pytest.mark.parametrize("experts", ["5,k=2,every=1", "2,k=1,unnormalized"])
@pytest.mark.parametrize("layout", ["dp", "zero3", "pp:1f1b"])
def test_of_experts_on_different_ranks(comm, layout, experts):
    """Ranks have different numbers of experts, or none; what is allocated depends on the tokens' choices."""
    ranks = comm.Get_size()
    said = {"data": "copy", "model": "gpt-moe:tiny", "experts": experts, "length": 16, "batch": 12, "micro_batch": 1}
    mesh = f"dp={ranks},ep={ranks}" if layout in LAYOUTS else f"pp=1,dp={ranks},ep={ranks}"
    with Training(complete(said | {"steps": 2, "mesh": mesh, "layout": layout}), comm) as made:
        list(made.run())
        assert made.forecast.predicted == made.engine.ledger.predicted
        assert made.forecast.needed == made.engine.ledger.needed


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", STYLES)
def test_of_replicas(comm, data, style):
    if style == "hogwild" and len(set(comm.nodes or (0,))) > 1:
        pytest.skip("hogwild is for one node")
    agree(*forecast_and_ledger(comm, data, layout=style))


@pytest.mark.parametrize("more", [{}, {"reproducible": True}, {"precision": "bf16", "optimizer": "sgd"}], ids=str)
@pytest.mark.parametrize("layout", ["pp", "pp:zb-h1", "pp:gpipe", "pp:pipedream-2bw", "pp:auto"])
def test_of_pipelines(comm, layout, more):
    """Of a text, so that a table is tied; cut by what was measured."""
    if comm.size > 4:
        pytest.skip("more stages than units")
    more = {"model": "gpt:tiny", "length": 16, "batch": 16, "steps": 2, "warm_up": 0, "clip": 0.0, **more}
    if layout == "pp:pipedream-2bw" and comm.size > 1:
        pytest.skip("the table is tied")
    agree(*forecast_and_ledger(comm, "copy", layout=layout, **more))


SERVED = [
    {},
    {"consistency": "ssp:2", "clip": 0.5},
    {"consistency": "async", "precision": "bf16"},
    {"reproducible": True, "micro_batch": 1, "precision": "bf16", "optimizer": "sgd"},
    {"servers": 2, "replicas": 2, "micro_batch": 2},
]


@pytest.mark.parametrize("more", SERVED, ids=str)
@pytest.mark.parametrize("what", ["mlp", "gpt"])
def test_of_servers_and_workers(comm, data, what, more):
    """All is known with one worker. Several draw any parts and push in any order: the forecast has the worst."""
    workers = comm.size - more.get("servers", 1)
    if workers < 1:
        pytest.skip("too few ranks")
    if what == "gpt":
        more = {"model": "gpt:tiny", "length": 16, "batch": 16, "steps": 2, "warm_up": 0, **more}
    forecast, ledger = forecast_and_ledger(comm, data if what == "mlp" else "copy", layout="ps", **more)
    expected, found = forecast.predicted, ledger.allocated
    if workers > 1:
        serves = comm.rank < more.get("servers", 1)
        least = "gradients" if serves else "activations"
        some = found.pop(least, 0)
        assert comm.allreduce(0 if serves else some) > 0
        assert some > 0 or not serves  # one worker may come too late for any part
        assert some <= expected.pop(least)
        assert ledger.work <= forecast.work
    else:
        assert forecast.needed == ledger.needed
    assert expected == found


STEPS = (6, 6, 5, 1)
"""Micro-batches of each step: as many as are planned, fewer, and fewer than there are replicas."""


def meshes(ranks, layouts=("dp", "zero1")):
    """All ways to divide the ranks into stages and replicas of some layouts."""
    stages = [number for number in range(1, ranks + 1) if ranks % number == 0]
    return [f"pp={one},{kind}={ranks // one}" for one in stages for kind in layouts]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "more", [{}, pytest.param({"reproducible": True, "precision": "bf16"}, marks=pytest.mark.full)], ids=str
)
@pytest.mark.parametrize(
    "schedule", default(SCHEDULES, "1f1b", "interleaved", "zb-v", "dualpipe", "dualpipe-v", "pipedream-2bw")
)
def test_of_every_schedule(comm, schedule, more):
    updates = SCHEDULES[schedule].version is not None
    of_a_pipeline(comm, schedule, [f"pp={comm.size}"] if updates else meshes(comm.size), **more)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", REPLICAS)
@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe"])
def test_of_every_layout_of_replicas(comm, schedule, layout):
    of_a_pipeline(comm, schedule, meshes(comm.size, [layout]), reproducible=True, precision="bf16")
    of_a_pipeline(comm, schedule, meshes(comm.size, [layout]))
    if not LAYOUTS[layout].divided:
        of_a_pipeline(comm, schedule, meshes(comm.size, [layout]), compress="int8")


def of_a_pipeline(comm, schedule, meshes, **more):
    """Stage by stage, for steps of other numbers of micro-batches, of other sizes."""
    updates = SCHEDULES[schedule].version is not None
    kind = AsynchronousPipeline if updates else Pipeline
    recipe, optimizer = PRECISIONS[more.get("precision", "fp32")], AdamW(rate=0.01)
    sizes = [tuple(range(5, 5 + count)) for count in STEPS]

    def shapes(samples):
        return ArraySpec((samples, 7), recipe.storage), ArraySpec((samples, 7), recipe.wide)

    for mesh in meshes:
        model = tiny_models.model(depth=2 * comm.size, tied=not updates)
        settings = Settings(layout=f"pp:{schedule}", mesh=mesh, microbatches=6, bucket_bytes=5000, **more)
        workload = Workload(comm.rank, comm.size, shapes, sizes)
        forecast = kind.forecast(model, tiny_models.Squares(), optimizer, workload, settings)
        with kind(model, tiny_models.Squares(), comm, optimizer, settings) as made:
            for step, some in enumerate(sizes):
                batches = [tiny_models.batches([number], step, some[number])[0] for number in made.share(len(some))]
                made.step([Batch(number, x, y, np.arange(len(x)) + 100 * number) for number, x, y, _ in batches])
            agree(forecast, made.ledger)


# -------------------------------------------------------------------------- parts that need most by turns


@pytest.mark.parametrize("first", default(range(1, 9), 1, 4, 8))
def test_groups_of_a_pipeline_need_most_in_different_steps(comm, first):
    """The leaves of a tied matrix are two for each micro-batch, so it has fewest nodes where others have most."""
    with Communicator(comm, shared=False) as plain:
        model = tiny_models.model(depth=2 * plain.size)
        mesh = f"pp={plain.size}"
        settings = Settings(layout="pp", mesh=mesh, reproducible=True, first_bytes=1, bucket_bytes=5000, microbatches=8)
        with Pipeline(model, tiny_models.Squares(), plain, SGD(rate=0.05), settings) as made:
            for step, count in enumerate((first, 8, 7, 3)):
                made.step(tiny_models.batches(made.share(count), step))
                assert made.ledger.predicted == made.ledger.allocated
