"""Parts of a pipeline with unequal numbers of replicas: one rank's gradients, or PipeDream's, and equal copies."""

from itertools import pairwise

import numpy as np
import pytest
from mpi4py import MPI
from support import tiny_models
from support.training_states import differing, whole

from collectives import Communicator
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.memory_ledger import Workload
from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import FlatParams
from parallel.nn.operator import ArraySpec, PassMode
from parallel.optim.optimizers import LAMB, SGD, AdamW
from parallel.optim.precision import PRECISIONS
from parallel.pipeline.asynchronous_pipeline import AsynchronousPipeline
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.pipeline.schedule.actions import gradients_by_update
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.runtime.consistency_check import StepFailed

pytestmark = pytest.mark.ranks(3)

RANKS = MPI.COMM_WORLD.Get_size()
STEPS = (6, 6, 5, 1)


def divisions(ranks):
    """Numbers of replicas of each part: all ways for up to three ranks, and some for more."""
    if ranks <= 3:
        return {1: ["1"], 2: ["1,1", "2"], 3: ["2,1", "1,2", "3"]}[ranks]
    return [f"{ranks - 1},1", f"1,{ranks - 1}", f"{ranks - 3},2,1", f"{ranks}"]


turns = pytest.mark.parametrize("ranks", divisions(RANKS))


def engine(comm, schedule, ranks, model, optimizer=None, layout="dp", microbatches=6, **settings):
    mesh = f"{layout}=1,pp={comm.size}"
    settings = {"first_bytes": 1, "bucket_bytes": 5000, **settings}
    settings = Settings(
        layout=f"pp:{schedule}", mesh=mesh, stage_ranks=ranks, microbatches=microbatches, **settings
    )  # fmt: skip
    kind = Pipeline if SCHEDULES[schedule].version is None else AsynchronousPipeline
    return kind(model, tiny_models.Squares(), comm, optimizer or SGD(rate=0.05, momentum=0.9), settings)


def untied():
    return tiny_models.model(depth=3, tied=False)


# ------------------------------------------------------------------------------------------ with a flush


@turns
@pytest.mark.parametrize("layout", ["dp", "zero1", "zero3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_same_bits_as_one_rank(comm, ranks, layout, tied):
    settings = {"reproducible": True, "clip": 1.0, "precision": "bf16"}
    states = []
    with Communicator(MPI.COMM_SELF) as alone:
        model, optimizer = tiny_models.model(tied=tied), SGD(rate=0.05, momentum=0.9)
        one = DataParallelEngine(model, tiny_models.Squares(), alone, optimizer, Settings(**settings))
        several = engine(comm, "1f1b", ranks, tiny_models.model(tied=tied), optimizer, layout, **settings)
        for at, made in ((alone, one), (comm, several)):
            with made:
                reports = [made.step(tiny_models.batches(made.share(count), step)) for step, count in enumerate(STEPS)]
                tested = made.evaluate(tiny_models.batches(made.share(7), 99))
                assert made.ledger.predicted == made.ledger.allocated
                states.append(([report.loss for report in reports], tested, whole(at, made)))
    assert states[0][:2] == states[1][:2]
    assert differing(states[0][2], states[1][2]) == []


@turns
def test_compressed_sums_of_everything_are_plain_training(comm, ranks):
    losses = []
    for compress in ("topk:1", "none"):
        with engine(comm, "1f1b", ranks, untied(), compress=compress, check_every=1) as made:
            losses.append([made.step(tiny_models.batches(made.share(6), 0)).loss for _ in range(4)])
    np.testing.assert_allclose(*losses, rtol=1e-5)


# ------------------------------------------------------------------------------------------ without a flush


def gradients_of(model, loss, x, y):
    """Sum of losses of a micro-batch, and its gradients by id(parameter)."""
    found, passed = {}, []
    for unit in model.items:
        x, saved = unit.forward(x, PassMode(True, 0, 0, np.arange(len(y))))
        passed.append((unit, saved))

    def add(parameter, compute):
        found[id(parameter)] = np.zeros(parameter.shape)
        compute(found[id(parameter)])

    value, saved = loss.forward(x, y)
    dy = loss.backward(1.0, saved)
    for unit, saved in reversed(passed):
        dy = unit.backward(dy, saved, add)
    return value, found


def as_planned(plan, cuts, microbatches, steps, rate):
    """PipeDream in one process: losses and final weights by name; SGD without momentum.

    Every part of the model has versions of its weights, of which the plan names one for each micro-batch.
    """
    model, loss = untied(), tiny_models.Squares()
    flat = FlatParams(model)
    vector = np.zeros(flat.length)
    flat.initialise(vector, 0)
    flat.bind(vector)
    parts = [list(Sequential(model.items[start:stop]).parameters()) for start, stop in pairwise(cuts)]
    versions = [[{one: one.data.copy() for one in part}] for part in parts]
    lines = [gradients_by_update(line).items() for line in plan.actions]
    update_of = {action.microbatch: number for line in lines for number, some in line for action in some}
    losses = []
    for step in range(steps):
        values, count, totals = 0.0, 0, {}
        for number, x, y, _ in tiny_models.batches(range(microbatches), step):
            for place, part in zip(plan.placement.route(number), versions):
                for one, weights in part[plan.versions[place.stage][number]].items():
                    one.data = weights
            value, gradients = gradients_of(model, loss, x, y)
            values, count = values + value, count + len(y)
            for key, gradient in gradients.items():
                totals[key] = totals.get(key, 0) + gradient
            if update_of.get(number + 1) != update_of[number]:
                for part in versions:
                    part.append({one: w - rate * totals[id(one)] / count for one, w in part[-1].items()})
                count, totals = 0, {}
        losses.append(values / (5 * microbatches))
        versions = [part[-1:] for part in versions]
    return losses, {one.name: weights for part in versions for one, weights in part[0].items()}


@turns
@pytest.mark.parametrize("layout", ["dp", "zero1"])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_weights_are_those_of_the_plan(comm, schedule, ranks, layout):
    microbatches = 2 * RANKS + 1 if schedule == "pipedream" else 2 * RANKS
    with engine(
        comm, schedule, ranks, untied(), SGD(rate=0.05), layout, microbatches, precision="fp64"
    ) as made:  # fmt: skip
        losses = [made.step(tiny_models.batches(made.share(microbatches), step)).loss for step in range(2)]
        assert made.ledger.predicted == made.ledger.allocated
        assert len(set(comm.allgather(made.updates))) == 1
        state, plan, cuts = whole(comm, made), made.plan, made.cuts
        for part in made._parts:  # copies of a part on its replicas are the same
            copies = part.context.comm.allgather(part.weights.vector.tobytes())
            assert len(set(copies)) == 1
    expected, weights = as_planned(plan, cuts, microbatches, 2, 0.05)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    for name, values in weights.items():
        np.testing.assert_allclose(state[f"model/{name}"], values.reshape(-1), rtol=1e-11, atol=1e-12)


@turns
@pytest.mark.parametrize("optimizer", [AdamW(rate=0.01), LAMB(rate=0.01)], ids=str)
@pytest.mark.parametrize("options", [{"layout": "zero1"}, {"compress": "int8"}, {"reproducible": True}], ids=str)
def test_it_learns(comm, ranks, optimizer, options):
    with engine(comm, "pipedream", ranks, untied(), optimizer, microbatches=8, **options) as made:
        losses = [made.step(tiny_models.batches(made.share(count), 0)).loss for count in (8, 8, 5, 1, 8, 8)]
        assert losses[-1] < losses[0]
        assert made.ledger.predicted == made.ledger.allocated
        for part in made._parts:
            assert len(set(part.context.comm.allgather(part.weights.vector.tobytes()))) == 1


@turns
@pytest.mark.parametrize("failing", range(RANKS))
def test_replicas_of_a_stage_that_fails_stay_the_same(comm, ranks, failing):
    net = untied()

    def fail(x, run):
        raise RuntimeError("the unit has had enough")

    with engine(comm, "pipedream", ranks, net, microbatches=8) as made:
        made.step(tiny_models.batches(made.share(8)))
        if comm.rank == failing:
            for unit in net.items:
                unit.forward = fail
        with pytest.raises(StepFailed, match="the unit has had enough"):
            made.step(tiny_models.batches(made.share(8)))
        for unit in net.items if comm.rank == failing else ():
            del unit.forward
        for part in made._parts:
            assert len(set(part.context.comm.allgather(part.weights.vector.tobytes()))) == 1
        assert made.step(tiny_models.batches(made.share(8))).count == 40


@turns
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream-2bw"])
def test_the_forecast_is_the_ledger(comm, schedule, ranks):
    recipe, optimizer = PRECISIONS["fp32"], AdamW(rate=0.01)
    plan = {"layout": f"pp:{schedule}", "mesh": f"pp={comm.size}", "stage_ranks": ranks, "microbatches": 2 * RANKS}

    def shapes(samples):
        return ArraySpec((samples, 7), recipe.storage), ArraySpec((samples, 7), recipe.wide)

    for more in ({}, {"reproducible": True}, {"compress": "int8"}):
        settings = Settings(bucket_bytes=5000, **plan, **more)
        kind = Pipeline if schedule == "1f1b" else AsynchronousPipeline
        counts = (2 * RANKS, RANKS, 1)
        workload = Workload(comm.rank, comm.size, shapes, [(5,) * count for count in counts])
        forecast = kind.forecast(untied(), tiny_models.Squares(), optimizer, workload, settings)
        with kind(untied(), tiny_models.Squares(), comm, optimizer, settings) as made:
            for count in counts:
                made.step(tiny_models.batches(made.share(count)))
            assert forecast.predicted == made.ledger.predicted == made.ledger.allocated
            assert forecast.needed == made.ledger.needed


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"ranks": "0,1"}, "expected numbers from 1 on that add up to"),
        ({"ranks": "99"}, "expected numbers from 1 on that add up to"),
        ({"ranks": "x"}, "stage_ranks: expected numbers as in 2,1,1, found 'x'"),
        ({"schedule": "zb-v"}, "stages have replicas in 1f1b, pipedream, pipedream-2bw; found zb-v"),
    ],
)
def test_what_cannot_be(comm, settings, told):
    with pytest.raises(ValueError, match=told):
        engine(comm, **{"schedule": "1f1b", "ranks": str(comm.size), "model": Sequential(untied().items), **settings})
