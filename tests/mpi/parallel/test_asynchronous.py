"""Pipelines that update on the way: which weights every micro-batch uses, and what a step comes to."""

import numpy as np
import pytest
from support import tiny_models
from support.training_states import differing, whole

from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.optim.optimizers import LAMB, SGD, AdamW
from parallel.pipeline.asynchronous_pipeline import AsynchronousPipeline
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.pipeline.schedule.pipeline_plan import build, truncate
from parallel.pipeline.stage_params import updates_of
from parallel.runtime.consistency_check import StepFailed

pytestmark = pytest.mark.ranks(3)

SCHEDULES = ["pipedream", "pipedream-2bw"]
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


class Watched(tiny_models.Dense):
    """Remembers the weights with which it went forward and backward."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.seen = []

    def forward(self, x, run):
        if run.training:
            self.seen.append(("F", self.weight.data.copy()))
        return super().forward(x, run)

    def backward(self, dy, saved, grads):
        self.seen.append(("B", self.weight.data.copy()))
        return super().backward(dy, saved, grads)


def model(stages):
    return Sequential([Watched(7, 20), *(Watched(20, 20) for _ in range(stages - 1)), Watched(20, 7)])


def engine(comm, schedule, microbatches, made=None, optimizer=None, **settings):
    made, optimizer = made or model(comm.size), optimizer or SGD(rate=0.05)
    plan = {"layout": f"pp:{schedule}", "mesh": f"pp={comm.size}", "microbatches": microbatches}
    return AsynchronousPipeline(made, tiny_models.Squares(), comm, optimizer, Settings(**plan, **settings))


def version_of(schedule, stage, stages, number):
    """What the papers say: PipeDream's stage is behind by what is under way, 2BW everywhere by one update."""
    return max(0, number - (stages - 1 - stage)) if schedule == "pipedream" else max(0, number // stages - 1)


@schedules
def test_forward_and_backward_use_the_version_that_is_predicted(comm, schedule):
    stages, stage, count = comm.size, comm.Get_rank(), 4 * comm.size
    if schedule == "pipedream-2bw" and stages == 1:
        pytest.skip("a single stage is never behind")
    net = model(stages)
    with engine(comm, schedule, count, net) as made:
        mine = net.items[made.cuts[stage]]
        first = mine.weight.data.copy()
        made.step(tiny_models.batches(made.share(count)))
        by_kind = {kind: [seen for one, seen in mine.seen if one == kind] for kind in "FB"}
        assert len(by_kind["F"]) == len(by_kind["B"]) == count
        wanted = [version_of(schedule, stage, stages, number) for number in range(count)]
        versions = [first]
        for number in range(count):  # the same values where the version is the same, others where it is not
            forward, backward = by_kind["F"][number], by_kind["B"][number]
            assert np.array_equal(forward, backward)
            if wanted[number] == len(versions):
                versions.append(forward)
            assert np.array_equal(forward, versions[wanted[number]])
        assert len({version.tobytes() for version in versions}) == len(versions)
        updates = count if schedule == "pipedream" else count // stages
        assert made.updates == updates
        staleness = max(at // (count // updates) - version for at, version in enumerate(wanted))
        assert staleness == (stages - 1 - stage if schedule == "pipedream" else 1)


@schedules
@pytest.mark.parametrize("optimizer", [SGD(rate=0.05, momentum=0.9), AdamW(rate=0.01), LAMB(rate=0.01)], ids=str)
def test_twice_the_same_bits_and_learning(comm, schedule, optimizer):
    found = []
    for _ in range(2):
        with engine(comm, schedule, 8, optimizer=optimizer) as made:
            reports = [made.step(tiny_models.batches(made.share(count), 0)) for count in (8, 8, 5, 8)]
            found.append(whole(comm, made))
            assert reports[-1].loss < reports[0].loss
            assert all(report.norm is None and not report.skipped for report in reports)
            assert dict(made.ledger.allocated) == dict(made.ledger.predicted)
            assert len(set(comm.allgather(made.updates))) == 1
            assert made.evaluate(tiny_models.batches(made.share(3), 9)).count == 15
    assert differing(*found) == []


@schedules
def test_a_training_goes_on_from_its_state(comm, schedule):
    with engine(comm, schedule, 8) as first, engine(comm, schedule, 8) as second:
        first.step(tiny_models.batches(first.share(8)))
        second.load(first.state())
        assert (second.steps, second.updates) == (first.steps, first.updates)


def test_updates_of_a_line():
    plan = build("pipedream-2bw", 2, 2, steps=3)
    assert updates_of(plan.actions[0]) == [(0, 1), (2, 3), (4, 5)]
    assert updates_of(truncate(plan, 5).actions[1]) == [(0, 1), (2, 3), (4,)]
    assert updates_of(truncate(plan, 0).actions[1]) == []


@schedules
def test_a_stage_that_fails(comm, schedule):
    net = model(comm.size)
    with engine(comm, schedule, 8, net) as made:

        def fail(x, run):
            raise RuntimeError("the unit has had enough")

        if comm.Get_rank() == comm.size - 1:
            net.items[-1].forward = fail
        with pytest.raises(StepFailed, match=r"made before stay; .*the unit has had enough"):
            made.step(tiny_models.batches(made.share(8)))
        assert len(set(comm.allgather(made.updates))) == 1
        if comm.Get_rank() == comm.size - 1:
            del net.items[-1].forward
        assert made.step(tiny_models.batches(made.share(8))).count == 40


@schedules
def test_no_stage_updates_after_a_failure_of_the_first(comm, schedule):
    net = model(comm.size)

    def fail(x, run):
        raise RuntimeError("the unit has had enough")

    with engine(comm, schedule, 8, net, SGD(rate=0.05, momentum=0.9, decay=0.1)) as made:
        made.step(tiny_models.batches(made.share(8)))
        before = whole(comm, made)
        if comm.Get_rank() == 0:
            net.items[0].forward = fail
        with pytest.raises(StepFailed, match="the unit has had enough"):
            made.step(tiny_models.batches(made.share(8)))
        assert differing(whole(comm, made), before) == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"clip": 1.0}, "clip: pipedream"),
        ({"precision": "fp16"}, "no loss scale"),
        ({"mesh": "pp=1,dp={}"}, "replicas by stage_ranks"),
        ({"mesh": "pp={},zero3=1"}, "keeps versions of whole weights"),
    ],
)
def test_what_cannot_be(comm, settings, told):
    settings = {name: value.format(comm.size) if name == "mesh" else value for name, value in settings.items()}
    if "mesh" in settings and comm.size == 1:
        pytest.skip("one rank has no replicas")
    plan = {"layout": "pp:pipedream", "mesh": f"pp={comm.size}", "microbatches": 8, **settings}
    with pytest.raises(ValueError, match=told):
        AsynchronousPipeline(model(comm.size), tiny_models.Squares(), comm, SGD(rate=0.1), Settings(**plan))


def test_the_other_engine(comm):
    plan = {"mesh": f"pp={comm.size}", "microbatches": 8}
    with pytest.raises(ValueError, match="it is for Asynchronous"):
        Pipeline(model(comm.size), tiny_models.Squares(), comm, SGD(rate=0.1), Settings(layout="pp:pipedream", **plan))
    with pytest.raises(ValueError, match=r"it is for Pipeline|gpipe flushes after every step"):
        AsynchronousPipeline(
            model(comm.size), tiny_models.Squares(), comm, SGD(rate=0.1), Settings(layout="pp:gpipe", **plan)
        )
    if comm.size > 1:
        with pytest.raises(ValueError, match="belongs to several"):
            AsynchronousPipeline(
                tiny_models.model(), tiny_models.Squares(), comm, SGD(rate=0.1), Settings(layout="pp:pipedream", **plan)
            )
