"""Two micro-batches in flight (`overlap_expert_comm`): bits, exchanges, memory and errors. Ranks are threads."""

from typing import ClassVar

import numpy as np
import pytest
from conformance import thread_meeting
from conformance.thread_communicator import ThreadCommunicator, run_threads

from parallel import AdamW, Engine, nn
from parallel.engine.memory_ledger import Workload
from parallel.engine.settings import Settings
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.linear import Linear
from parallel.nn.models import transformer
from parallel.nn.operator import ArraySpec, Operator
from parallel.nn.router import RouterSettings
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.pipeline.schedule.pass_pairs import paired
from parallel.pipeline.schedule.pipeline_plan import build
from parallel.runtime.consistency_check import StepFailed
from parallel.runtime.interleaving import give_way
from parallel.sharding.expert import piecewise_route
from parallel.sharding.mesh import Mesh

TOKENS, LENGTH, WIDTH = 32, 8, 8
ROUTERS = {
    "dropless": RouterSettings(balance_loss=0.1, z_loss=0.01),
    "capacity": RouterSettings(scores="sigmoid", bias_rate=0.1, capacity=1.0, priority="score"),
}


class Fault(Operator):
    """Identity that raises an error in one rank's passes of the micro-batch with sample `sample`."""

    sample = -1

    def forward(self, x, run):
        if self.sample in run.samples:
            raise ValueError("it is broken")
        return x, ()

    def backward(self, dy, saved, grads):
        return dy


def model(router, *others):
    """Two blocks, the second recomputed; with other operators before them."""
    layers = ExpertLayers(5, ROUTERS[router], shared=True)
    made = transformer(TOKENS, LENGTH, 2, 2, WIDTH, dropout=0.1, recompute="none,full", experts=layers)
    made.items[1:1] = others
    return made


def batch(step, samples):
    tokens = np.random.default_rng(step).integers(0, TOKENS, (samples, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def engine_of(comm, router, *others, **options):
    options = {"batch": 7, "micro_batch": 1, "clip": 1.0, "check_every": 1, **options}
    return Engine(model(router, *others), nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.01), **options)


def trained(comm, router, samples, **options):
    """Reports, weights and exchanges of two steps, and the ledger."""
    with engine_of(comm, router, batch=10, **options) as engine:
        reports = [engine.step(*batch(step, samples)) for step in range(2)]
        communicators = [comm, *engine.inner._mesh._comms.values()]
        calls = [sorted(map(repr, one.calls)) for one in communicators]
        seen = [(one.loss, one.norm, one.terms, one.counts) for one in reports]
        weights = {name: np.asarray(value).tobytes() for name, value in engine.state_dict().items()}
        return seen, weights, calls, engine.inner.ledger


def with_routers(cases, *full):
    """Cases with every router; each is in the default tests with half of them, but those in `full`."""
    return [
        pytest.param(router, *case, marks=() if (number + place) % 2 and case not in full else pytest.mark.full)
        for number, case in enumerate(cases)
        for place, router in enumerate(ROUTERS)
    ]


CASES = [  # mesh, settings, samples
    ("dp=2,ep=2", {"reproducible": True}, 7),
    ("dp=2,ep=2", {"reproducible": True}, 2),
    ("dp=2,ep=2", {"layout": "zero1"}, 6),
    ("dp=4,ep=2", {"layout": "zero2"}, 7),
    ("dp=4,ep=4", {"layout": "dp-bucket"}, 7),
    ("tp=2,dp=2,ep=4", {"layout": "zero1", "reproducible": True}, 5),
    ("tp=2,dp=2,ep=2,etp=2", {"reproducible": False}, 5),
    ("dp=3,ep=3", {"layout": "zero2", "reproducible": True}, 10),
    ("dp=2,cp=2,ep=4", {}, 6),
]


@pytest.mark.parametrize(
    ("router", "mesh", "changed", "samples"),
    with_routers(CASES, CASES[1], CASES[3], CASES[5]),
)
def test_bits_and_exchanges_of_one_after_the_other(router, mesh, changed, samples):
    """With 1 to 4 micro-batches on a rank, some fewer than others."""
    ranks = Mesh.parse(mesh).size

    def run(overlap):
        return run_threads(
            ranks, lambda comm: trained(comm, router, samples, mesh=mesh, overlap_expert_comm=overlap, **changed)
        )

    for rank, (found, expected) in enumerate(zip(run(True), run(False), strict=True)):
        assert found[:3] == expected[:3]
        ledger, one = found[3], expected[3]
        several = samples > Mesh.parse(mesh).sizes["dp"]
        assert ledger.predicted["activations"] == (1 + several) * one.predicted["activations"]
        more = ledger.allocated["activations"] - one.allocated["activations"]
        assert more > 0 if several and rank == 0 else more >= 0
        for kind in ("parameters", "gradients", "optimizer", "buffers"):
            assert ledger.predicted[kind] == ledger.allocated[kind] == one.allocated[kind]


def nodes_of(comm):
    """Node of each rank, as of a `Communicator`: the first of all ranks has one of its own."""
    nodes = [int(rank > 0) for rank in comm._members]
    return tuple(nodes) if len(set(nodes)) > 1 else None


def test_different_routes(monkeypatch):
    """Tokens of ranks 0 and 2 cross the network, in two pieces but in the last turn; their partners' along tp do not.

    That turn has a micro-batch on two ranks only.
    """
    monkeypatch.setattr(ThreadCommunicator, "nodes", property(nodes_of))
    monkeypatch.setattr(piecewise_route, "LEAST", 12)  # of 16 assignments of a micro-batch
    monkeypatch.setattr(thread_meeting, "PATIENCE", 60.0)
    options = {"mesh": "dp=2,tp=2,ep=2,etp=2", "dispatch": "hierarchical"}

    def run(overlap):
        return run_threads(4, lambda comm: trained(comm, "dropless", 5, overlap_expert_comm=overlap, **options)[:3])

    found = run(True)
    assert found == run(False)
    exchanges = [sum("alltoallv" in call for calls in every for call in calls) for _, _, every in found]
    assert exchanges[0] == exchanges[2] == exchanges[1] * 5 / 3 and exchanges[1] == exchanges[3]


PIPELINES = [  # mesh, schedule, settings
    ("pp=2,dp=2,ep=2", "dualpipe", {"reproducible": True}),
    ("pp=2,zero1=2,ep=2", "interleaved", {}),
    ("dp=2,pp=2,ep=2", "dualpipe-v", {"precision": "bf16"}),
    ("pp=2,zero2=2,ep=2", "zb-v", {"reproducible": True}),
    ("pp=1,dp=3,ep=3", "dualpipe", {}),
    ("pp=2,dp=2,ep=2", "gpipe", {"clip": 0.0}),
    ("pp=2,dp=2,tp=2,ep=4", "dualpipe", {"reproducible": True}),
    ("pp=2,cp=2,ep=2", "interleaved", {}),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("router", "mesh", "schedule", "changed"),
    with_routers(PIPELINES, PIPELINES[1], PIPELINES[4], PIPELINES[5]),
)
def test_pipelines(router, mesh, schedule, changed):
    """Bits, exchanges and memory of one pass after the other; the replicas have six micro-batches each, or fewer."""
    replicas = next((size for name, size in Mesh.parse(mesh).sizes.items() if name not in ("pp", "cp", "tp")), 1)
    options = {"layout": f"pp:{schedule}", "mesh": mesh, "micro_batch": 1, **changed}

    def run(overlap):
        def main(comm):
            with engine_of(comm, router, batch=6 * replicas, overlap_expert_comm=overlap, **options) as engine:
                reports = [engine.step(*batch(step, samples)) for step, samples in enumerate((6 * replicas, 4))]
                assert bool(engine.inner.plan.pairs) == overlap and not engine.remarks
                communicators = [comm, *engine.inner._mesh._comms.values()]
                calls = [sorted(map(repr, one.calls)) for one in communicators]
                weights = {name: np.asarray(value).tobytes() for name, value in engine.state_dict().items()}
                seen = [(one.loss, one.norm, one.terms, one.counts) for one in reports]
                return seen, weights, calls, engine.inner.ledger.allocated, engine.inner.ledger.predicted

        return run_threads(Mesh.parse(mesh).size, main)

    for found, expected in zip(run(True), run(False), strict=True):
        assert found == expected
        assert all(found[3][kind] == found[4][kind] for kind in ("parameters", "gradients", "optimizer", "buffers"))


def test_remark_without_pairs():
    def main(comm):
        options = {"mesh": "pp=1,dp=2,ep=2", "layout": "pp:1f1b", "batch": 8, "overlap_expert_comm": True}
        with engine_of(comm, "dropless", **options) as engine:
            assert "pairs of passes would not shorten the steps of 1f1b; there are none" in engine.remarks[0]

    run_threads(2, main)


@pytest.mark.parametrize("mesh", ["pp=1,dp=2,ep=2", "pp=2,dp=2,ep=2"])
def test_forecast_of_pairs(mesh):
    """Without an engine the same as with one; of activations as many bytes as without pairs."""

    def main(comm, overlap):
        layers, loss, optimizer = ExpertLayers(4, ROUTERS["dropless"]), nn.SoftmaxCrossEntropy(), AdamW(lr=0.01)
        made = [transformer(TOKENS, LENGTH, 2, 2, WIDTH, dropout=0.1, experts=layers) for _ in range(2)]
        options = {"mesh": mesh, "layout": "pp:dualpipe", "batch": 12, "micro_batch": 1, "overlap_expert_comm": overlap}
        with Engine(made[0], loss, comm, optimizer, **options) as engine:
            x, y = (ArraySpec(array.shape, array.dtype) for array in batch(0, 1))
            engine.step(*batch(0, 12))
            workload = Workload(comm.Get_rank(), comm.Get_size(), lambda samples: (x, y), [(1,) * 12])
            forecast = Pipeline.forecast(made[1], loss, optimizer, workload, engine.inner.settings)
            found, ledger = (forecast.predicted, forecast.work), engine.inner.ledger
            assert found == (ledger.predicted, ledger.work)
            return found

    def run(overlap):
        return run_threads(Mesh.parse(mesh).size, lambda comm: main(comm, overlap))

    for (predicted, work), (expected, least) in zip(run(True), run(False), strict=True):
        assert predicted == expected and least < work <= 2 * least


class Yielding(Operator):
    """Identity that gives way in its passes, as experts do."""

    def forward(self, x, run):
        give_way()
        return x, ()

    def backward(self, dy, saved, grads):
        give_way()
        return dy


@pytest.mark.parametrize("schedule", ["dualpipe", "interleaved", "zb-v"])
def test_memory_of_pairs(schedule):
    """Predicted to the byte; temporaries are those of both passes."""

    def main(comm, pairs):
        made = transformer(TOKENS, LENGTH, 6, 2, WIDTH)
        made.items[2:2], made.items[-2:-2] = [Yielding()], [Yielding()]
        plan = build(schedule, 2, 8)
        settings = Settings(layout=f"pp:{schedule}", mesh="pp=2", microbatches=8)
        arrays = [[array.copy() for array in batch(number, 2)] for number in range(8)]
        data = [(number, x, y, np.array([2 * number, 2 * number + 1])) for number, (x, y) in enumerate(arrays)]
        plan = paired(plan) if pairs else plan
        with Pipeline(made, nn.SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), settings, plan) as engine:
            loss = engine.step(data).loss
            assert engine.ledger.predicted == engine.ledger.allocated
            return loss, engine.ledger.predicted, engine.ledger.work

    for found, one in zip(*(run_threads(2, lambda comm, pairs=pairs: main(comm, pairs)) for pairs in (True, False))):
        assert found[:2] == one[:2]
        assert one[2] < found[2] <= 2 * one[2]


class Noted(Linear):
    """Linear layer that notes its passes of rank 0, which has the first three samples."""

    events: ClassVar[list[tuple[str, int]]] = []

    def forward(self, x, run):
        y, saved = super().forward(x, run)
        self.note("forward", run.samples[0])
        return y, (saved, run.samples[0])

    def backward(self, dy, saved, grads):
        self.note("backward", saved[1])
        return super().backward(dy, saved[0], grads)

    def note(self, what, sample):
        if sample < 3:
            self.events.append((what, int(sample)))


def events_of(at, overlap, **options):
    """Passes of rank 0 through a layer before the item number `at`, in a step of three micro-batches."""

    def main(comm):
        made = model("dropless")
        made.items[at:at] = [Noted(WIDTH, WIDTH)]
        with Engine(
            made, nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.01), overlap_expert_comm=overlap, **options
        ) as engine:
            engine.step(*batch(0, 6))

    Noted.events.clear()
    run_threads(2, main)
    return [*Noted.events]


def test_passes_alternate():
    """The next micro-batch's forward pass has begun when a backward pass is at its first expert, and not before."""
    one_by_one = [(what, number) for number in range(3) for what in ("forward", "backward")]
    options = {"mesh": "dp=2,ep=2", "batch": 6, "micro_batch": 1}
    assert events_of(1, False, **options) == one_by_one
    ahead = [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("backward", 1), ("backward", 2)]
    assert events_of(1, True, **options) == ahead


def test_passes_of_a_pair_alternate():
    """The first backward pass has begun when the last forward pass is at its first expert, and not before."""
    options = {"mesh": "pp=1,dp=2,ep=2", "layout": "pp:gpipe", "batch": 6, "micro_batch": 1}
    forwards, backwards = ([(what, number) for number in range(3)] for what in ("forward", "backward"))
    assert events_of(3, False, **options) == forwards + backwards
    assert events_of(3, True, **options) == [*forwards[:2], backwards[0], forwards[2], *backwards[1:]]


@pytest.mark.parametrize(("mesh", "layout"), [("dp=2,ep=2", "dp"), ("pp=2,dp=2,ep=2", "pp:dualpipe")])
@pytest.mark.parametrize("sample", [0, 3, 6])
def test_error_of_one_rank(sample, mesh, layout):
    """An error in any micro-batch is raised on all ranks, with nothing updated; the next step succeeds."""

    def main(comm):
        options = {"mesh": mesh, "layout": layout, "batch": 8, "overlap_expert_comm": True}
        with engine_of(comm, "dropless", Fault(), **options) as engine:
            before = engine.state_dict()
            Fault.sample = sample
            comm.Barrier()
            with pytest.raises(StepFailed, match="nothing was updated; rank"):
                engine.step(*batch(0, 7))
            comm.Barrier()
            Fault.sample = -1
            after = engine.state_dict()
            assert all(np.array_equal(before[name], after[name]) for name in before)
            return engine.step(*batch(1, 7)).loss

    assert len(set(run_threads(Mesh.parse(mesh).size, main))) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mesh": "dp=2"}, "overlap_expert_comm: True is for replicas that share experts, by ep; found dp=2"),
        ({"batch": 2}, r"overlap_expert_comm: expected steps of several micro-batches \(accumulate\), found 1 a rank"),
        ({"micro_batch": 4}, r"expected steps of several micro-batches \(accumulate\), found 1 a rank"),
        ({"micro_batch": None}, r"expected steps of several micro-batches \(accumulate\), found 1 a rank"),
        ({"mesh": "tp=2,ep=2"}, "overlap_expert_comm: True is for replicas that share experts, by ep"),
        ({"layout": "zero3"}, "overlap_expert_comm: it belongs to dp-naive, dp-bucket, dp, zero1, zero2, pp, and"),
        ({"mesh": "pp=2", "layout": "pp:1f1b"}, "overlap_expert_comm: True is for replicas that share experts, by ep"),
        (
            {"mesh": "zero3=2,pp=1,ep=2", "layout": "pp:dualpipe", "batch": 6},
            "zero3 has the weights of one unit at a time",
        ),
        ({"mesh": "dp=2,pp=1,ep=2", "layout": "pp:pipedream", "batch": 6}, "pipedream is for one pipeline, with repli"),
        ({"mesh": None, "layout": "ps"}, "overlap_expert_comm: it belongs to dp-naive, dp-bucket, dp, zero1"),
    ],
)
def test_refused(changed, message):
    def main(comm):
        with pytest.raises(ValueError, match=message):
            engine_of(comm, "dropless", **{"mesh": "dp=2,ep=2", "overlap_expert_comm": True, **changed})

    run_threads(2, main)
