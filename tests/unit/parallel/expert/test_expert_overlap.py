"""Two micro-batches in flight (`overlap_expert_comm`): bits, exchanges, memory and errors. Ranks are threads."""

import numpy as np
import pytest

from parallel import AdamW, Engine, nn
from parallel.conformance.thread_communicator import run_threads
from parallel.mesh.mesh import Mesh
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.linear import Linear
from parallel.nn.models import transformer
from parallel.nn.operator import Operator
from parallel.nn.router import RouterSettings
from parallel.runtime.consistency_check import StepFailed

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
    with engine_of(comm, router, batch=samples, **options) as engine:
        reports = [engine.step(*batch(step, samples)) for step in range(2)]
        communicators = [comm, *(axis.comm for axis in engine.inner._mesh._axes.values())]
        calls = [sorted(map(repr, one.calls)) for one in communicators]
        seen = [(one.loss, one.norm, one.terms, one.counts) for one in reports]
        weights = {name: np.asarray(value).tobytes() for name, value in engine.state_dict().items()}
        return seen, weights, calls, engine.inner.ledger


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
    [
        pytest.param(router, *case, marks=() if (number + place) % 2 else pytest.mark.full)
        for number, case in enumerate(CASES)
        for place, router in enumerate(ROUTERS)
    ],
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


def test_passes_alternate():
    """The next micro-batch's forward pass has begun when a backward pass is at its first expert, and not before."""
    events = []

    class Noted(Linear):
        def forward(self, x, run):
            events.append(("forward", int(run.samples[0])))
            y, saved = super().forward(x, run)
            return y, (saved, int(run.samples[0]))

        def backward(self, dy, saved, grads):
            events.append(("backward", saved[1]))
            return super().backward(dy, saved[0], grads)

    def main(comm, overlap):
        options = {"mesh": "dp=2,ep=2", "overlap_expert_comm": overlap, "batch": 6}
        with engine_of(comm, "dropless", Noted(WIDTH, WIDTH), **options) as engine:
            engine.step(*batch(0, 6))

    def order(overlap):
        events.clear()
        run_threads(2, lambda comm: main(comm, overlap))
        return [event for event in events if event[1] < 3]  # of rank 0

    one_by_one = [(what, number) for number in range(3) for what in ("forward", "backward")]
    assert order(False) == one_by_one
    ahead = [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("backward", 1), ("backward", 2)]
    assert order(True) == ahead


@pytest.mark.parametrize("sample", [0, 3, 6])
def test_error_of_one_rank(sample):
    """An error in any micro-batch is raised on all ranks, with nothing updated; the next step succeeds."""

    def main(comm):
        with engine_of(comm, "dropless", Fault(), mesh="dp=2,ep=2", overlap_expert_comm=True) as engine:
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

    assert len(set(run_threads(2, main))) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mesh": "dp=2"}, "overlap_expert_comm: True is for replicas that share experts, by ep; found dp=2"),
        ({"mesh": "tp=2,ep=2"}, "overlap_expert_comm: True is for replicas that share experts, by ep"),
        ({"layout": "zero3"}, "overlap_expert_comm: it belongs to dp-naive, dp-bucket, dp, zero1, zero2, and"),
        ({"mesh": "pp=2", "layout": "pp:1f1b"}, "overlap_expert_comm: it belongs to dp-naive, dp-bucket, dp, zero1"),
        ({"mesh": None, "layout": "ps"}, "overlap_expert_comm: it belongs to dp-naive, dp-bucket, dp, zero1"),
    ],
)
def test_refused(changed, message):
    def main(comm):
        with pytest.raises(ValueError, match=message):
            engine_of(comm, "dropless", **{"mesh": "dp=2,ep=2", "overlap_expert_comm": True, **changed})

    run_threads(2, main)
