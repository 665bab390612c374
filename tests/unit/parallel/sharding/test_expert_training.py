"""Experts on different replicas: trainings are those of one rank; errors and refusals. Ranks are threads."""

import numpy as np
import pytest
from conformance.thread_communicator import run_threads

from parallel import LAMB, SGD, AdamW, Engine, nn
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.linear import Linear
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.models import transformer
from parallel.nn.router import Router, RouterSettings
from parallel.runtime.consistency_check import StepFailed
from parallel.sharding.mesh import Mesh

TOKENS, LENGTH, WIDTH = 32, 8, 8
ROUTERS = {
    "loss": RouterSettings(balance_loss=0.1, z_loss=0.01, noise=True),
    "bias": RouterSettings(scores="sigmoid", bias_rate=0.1, capacity=1.0, priority="score"),
}
ANY_ROUTER = ROUTERS | {"limit": RouterSettings(balance_loss=0.1, capacity=0.8, jitter=0.1)}
KINDS = ("parameters", "gradients", "optimizer", "buffers")
MESHES = ("dp=2,ep=2", "dp=3,ep=3", "dp=4,ep=2", "dp=4,ep=4")


LAYOUTS = ("dp", "dp-bucket", "zero1", "zero2", "zero3")
DEFAULT = {("bias", "dp=4,ep=2")}
"""Router and mesh that are tested in all layouts by default."""


def model(router="loss", recompute=False):
    """Two blocks, the second with five experts, which no mesh divides equally."""
    layers = ExpertLayers(5, ANY_ROUTER[router], every=2, shared=True)
    return transformer(TOKENS, LENGTH, 2, 2, WIDTH, dropout=0.1, recompute=recompute, experts=layers)


def batch(step, samples=7, length=LENGTH):
    tokens = np.random.default_rng(step).integers(0, TOKENS, (samples, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def options(**changed):
    return {"reproducible": True, "clip": 1.0, "batch": 7, "micro_batch": 2, "check_every": 1, **changed}


def trained(comm, router, steps=range(2), save=None, load=None, **changed):
    """Reports, an evaluation, weights, and the memory ledger, of a training whose steps have four micro-batches."""
    loss, recompute = nn.SoftmaxCrossEntropy(), changed.pop("recompute", False)
    with Engine(model(router, recompute), loss, comm, AdamW(lr=0.01), **options(**changed)) as engine:
        if load:
            engine.load(load)
        reports = [engine.step(*batch(step)) for step in steps]
        evaluation = engine.evaluate(*batch(9), loss.correct)  # cut as a step
        if save:
            engine.save(save)
        seen = [(one.loss, one.norm, one.terms, one.counts) for one in reports]
        return seen, evaluation, engine.state_dict(), engine.inner.ledger


def expect_same(found, expected):
    assert found[:2] == expected[:2]
    weights, others = found[2], expected[2]
    assert weights.keys() == others.keys()
    assert not [name for name in weights if np.asarray(weights[name]).tobytes() != np.asarray(others[name]).tobytes()]


ALONE = {}


def alone(router, **changed):
    key = router, *changed.items()
    if key not in ALONE:
        ALONE[key] = run_threads(1, lambda comm: trained(comm, router, **changed))[0]
    return ALONE[key]


CASES = [
    *(
        pytest.param(
            router, mesh, layout, marks=() if (router, mesh) in DEFAULT or layout == "zero1" else pytest.mark.full
        )
        for router in ROUTERS
        for mesh in MESHES
        for layout in LAYOUTS
    )
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("router", "mesh", "layout"), CASES)
def test_same_bits_as_one_rank(router, mesh, layout):
    """Some ranks have no micro-batch in the last turn; the ledger predicts what is allocated."""
    for found in run_threads(int(mesh[3]), lambda comm: trained(comm, router, mesh=mesh, layout=layout)):
        expect_same(found, alone(router))
        ledger = found[3]
        assert [ledger.predicted[kind] for kind in KINDS] == [ledger.allocated[kind] for kind in KINDS]


def in_pipelines(comm, router, mesh, layout, **changed):
    """Training on a mesh; in pipelines too a step has four micro-batches."""
    if layout.startswith("pp"):
        changed |= {"micro_batch": None, "microbatches": 4 // Mesh.parse(mesh).sizes["dp"], "batch": 8}
    return trained(comm, router, mesh=mesh, layout=layout, **changed)


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        ("pp=2,dp=2,ep=2", "1f1b"),
        ("pp=2,dp=1,tp=2,ep=2", "zb-h1"),
        pytest.param("dp=2,pp=2,ep=2", "dualpipe", marks=pytest.mark.full),
        pytest.param("pp=2,dp=2,tp=2,ep=4", "zb-h1", marks=pytest.mark.full),
        pytest.param("pp=2,dp=4,ep=2", "zb-v", marks=pytest.mark.full),
    ],
)
def test_pipelines(mesh, schedule):
    changed = {"tensor_shards": 2} if "tp" in mesh else {}
    ranks = Mesh.parse(mesh).size
    found = run_threads(ranks, lambda comm: in_pipelines(comm, "bias", mesh, f"pp:{schedule}", **changed))
    expect_same(found[0], alone("bias", **changed))


FOLDED = [  # mesh, layout, and settings that the run on one rank has too
    ("tp=2,ep=2", "dp", {"tensor_shards": 2}),
    ("dp=2,tp=2,ep=4", "zero1", {"tensor_shards": 2}),
    ("tp=2,etp=2", "zero3", {"tensor_shards": 2, "expert_shards": 2}),
    ("tp=2", "dp", {"tensor_shards": 2}),
    ("dp=2,tp=2,ep=2", "dp-bucket", {"tensor_shards": 2}),
    ("tp=2,ep=2", "zero2", {"tensor_shards": 2, "sequence_parallel": True}),
    ("tp=2,ep=2", "dp", {"tensor_shards": 4, "expert_shards": 2}),
    ("tp=4,ep=2,etp=2", "dp", {"tensor_shards": 4, "expert_shards": 2}),
    ("dp=2,tp=2,ep=2,etp=2", "zero3", {"tensor_shards": 2, "expert_shards": 2}),
    ("tp=4,ep=4", "zero2", {"tensor_shards": 4}),
]


@pytest.mark.parametrize(
    ("router", "mesh", "layout", "changed"),
    [
        pytest.param(router, *case, marks=() if router == "bias" and number < 3 else pytest.mark.full)
        for router in ROUTERS
        for number, case in enumerate(FOLDED)
    ],
)
def test_experts_over_shards(router, mesh, layout, changed):
    """Experts, or parts of them, on different ranks along tp: bits of one rank, whole tensors on all, and ledger."""
    ranks = Mesh.parse(mesh).size
    for found in run_threads(ranks, lambda comm: trained(comm, router, mesh=mesh, layout=layout, **changed)):
        expect_same(found, alone(router, **changed))
        ledger = found[3]
        assert [ledger.predicted[kind] for kind in KINDS] == [ledger.allocated[kind] for kind in KINDS]


DIVIDED = [  # meshes whose ranks along cp share sequences, and layouts
    ("cp=2,ep=2", "dp"),
    ("dp=2,cp=2,ep=4", "zero1"),
    ("dp=3,cp=2,ep=3", "zero3"),
    ("cp=2,dp=2,ep=2", "dp-bucket"),
    ("pp=2,cp=2,dp=1,ep=2", "pp:1f1b"),
    ("pp=2,dp=2,cp=2,ep=4", "pp:zb-h1"),
]
QUICK = {("loss", 0), ("limit", 1), ("bias", 4)}


@pytest.mark.parametrize(
    ("router", "mesh", "layout"),
    [
        pytest.param(router, *case, marks=() if (router, number) in QUICK else pytest.mark.full)
        for router in ANY_ROUTER
        for number, case in enumerate(DIVIDED)
    ],
)
def test_divided_sequences(router, mesh, layout):
    """Bits of the same parts of sequences without `ep`, ledger, and the values of one rank, to rounding."""
    ranks = Mesh.parse(mesh).size
    whole = run_threads(1, lambda comm: trained(comm, router, reproducible=False, precision="fp64"))[0]
    parts = run_threads(2, lambda comm: trained(comm, router, mesh="cp=2"))[0]
    for found in run_threads(ranks, lambda comm: in_pipelines(comm, router, mesh, layout)):
        expect_same(found, parts)
        assert [found[3].predicted[kind] for kind in KINDS] == [found[3].allocated[kind] for kind in KINDS]
    for seen, expected in zip(parts[0], whole[0]):
        assert seen[3] == expected[3]
        np.testing.assert_allclose(seen[:2], expected[:2], rtol=1e-5)
        np.testing.assert_allclose([*seen[2].values()], [*expected[2].values()], rtol=1e-5)


def test_mixtures_of_several_parts_are_refused():
    with pytest.raises(ValueError, match="sequence_parts: mixtures of experts take one part on each rank, found 2"):
        run_threads(1, lambda comm: trained(comm, "loss", sequence_parts=2))


def test_checkpoints_of_experts_over_shards(tmp_path):
    """One step each on five meshes."""
    meshes = ["tp=2,dp=2,ep=4", "dp=4,ep=2", "tp=4,ep=4", "tp=2,dp=2,ep=2", "dp=4"]
    for step, mesh in enumerate(meshes):
        changed = {
            "mesh": mesh,
            "tensor_shards": 4,
            "steps": range(step, step + 1),
            "layout": ["dp", "zero3"][step % 2],
        }
        found = run_threads(
            4,
            lambda comm, changed=changed, step=step: trained(
                comm, "bias", save=tmp_path, load=step and tmp_path, **changed
            ),
        )
    expected = run_threads(1, lambda comm: trained(comm, "bias", steps=range(5), tensor_shards=4))[0]
    expect_same(found[0], (expected[0][4:], *expected[1:3]))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("dp=2,ep=2", "dp"),
        ("dp=4,ep=4", "zero1"),
        ("tp=2,ep=2", "dp"),
        ("tp=2,dp=2,ep=4", "zero3"),
        ("pp=2,dp=2,ep=2", "pp:1f1b"),
    ],
)
def test_twenty_steps(router, mesh, layout):
    """Dropless ("loss"), and with capacity ("bias")."""
    changed = {"tensor_shards": 2, "steps": range(20)}
    ranks = Mesh.parse(mesh).size
    found = run_threads(ranks, lambda comm: in_pipelines(comm, router, mesh, layout, **changed))
    expect_same(found[0], alone(router, **changed))


@pytest.mark.parametrize("layout", ["dp", "zero3"])
@pytest.mark.parametrize("mesh", ["dp=3,ep=3", "dp=4,ep=2"])
def test_plain_sums(mesh, layout):
    changed = {"reproducible": False, "precision": "fp64"}
    expected = alone("loss", **changed)
    for found in run_threads(int(mesh[3]), lambda comm: trained(comm, "loss", mesh=mesh, layout=layout, **changed)):
        for (loss, norm, terms, counts), (other_loss, other_norm, other_terms, other_counts) in zip(
            found[0], expected[0], strict=True
        ):
            assert (loss, norm) == pytest.approx((other_loss, other_norm), rel=1e-12)
            assert terms == pytest.approx(other_terms, rel=1e-12) and counts == other_counts
        for name, weights in expected[2].items():
            np.testing.assert_allclose(found[2][name], weights, rtol=0, atol=1e-10, err_msg=name)


def test_encoded_rows():
    """Losses are near those of plain rows, and not the same."""
    changed = {"reproducible": False}
    found = run_threads(2, lambda comm: trained(comm, "loss", mesh="dp=2,ep=2", dispatch="direct:int8", **changed))
    losses, expected = ([loss for loss, *_ in one[0]] for one in (found[0], alone("loss", **changed)))
    assert losses == pytest.approx(expected, rel=1e-2) and losses != expected


def test_recomputed_blocks_send_tokens_again():
    found = run_threads(2, lambda comm: trained(comm, "bias", mesh="dp=2,ep=2", recompute=True))
    expect_same(found[0], alone("bias"))


def test_checkpoints_have_no_mesh(tmp_path):
    """One step each on four meshes."""
    for step, mesh in enumerate(["dp=4,ep=4", "dp=4,ep=2", "dp=4", "dp=4,ep=4"]):
        changed = {"mesh": mesh, "layout": ["zero1", "zero3"][step % 2], "steps": range(step, step + 1)}
        found = run_threads(
            4,
            lambda comm, changed=changed, step=step: trained(
                comm, "bias", save=tmp_path, load=step and tmp_path, **changed
            ),
        )
    expected = run_threads(1, lambda comm: trained(comm, "bias", steps=range(4)))[0]
    expect_same((found[0][0], *found[0][1:3]), (expected[0][3:], *expected[1:3]))


# ------------------------------------------------------------------------------------------ errors


class Faulty(Linear):
    """Expert that raises an error in the pass named by `fault`, on the rank that has it."""

    fault: str = ""

    def forward(self, x, run):
        if self.fault == "forward":
            raise ValueError("it is broken")
        return super().forward(x, run)

    def backward(self, dy, saved, grads):
        if self.fault == "backward":
            raise ValueError("it is broken")
        return super().backward(dy, saved, grads)


class Narrow(Linear):
    """Expert that raises an error, or returns a result or gradient that is too narrow, as the set `faults` has it."""

    def __init__(self, inputs, outputs, faults):
        super().__init__(inputs, outputs)
        self.faults = faults

    def forward(self, x, run):
        if "forward" in self.faults:
            raise ValueError("it is broken")
        y, saved = super().forward(x, run)
        return (y[:, 1:] if "result" in self.faults else y), saved

    def backward(self, dy, saved, grads):
        dx = super().backward(dy, saved, grads)
        return dx[:, 1:] if "gradient" in self.faults else dx


@pytest.mark.parametrize("mesh", ["dp=3,ep=3", "tp=2,ep=2", "tp=2,dp=2,ep=4"])
@pytest.mark.parametrize("what", ["forward", "result", "gradient"])
def test_an_error_between_exchanges(what, mesh):
    """Of one expert, while other ranks wait for its results; the training goes on."""
    ranks = Mesh.parse(mesh).size

    def main(comm):
        made, faults = model(), set()
        made.items[2].items[1].inner.items[1].experts.experts[4] = Narrow(WIDTH, WIDTH, faults)
        with Engine(made, nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1), **options(mesh=mesh)) as engine:
            faults.add(what)
            with pytest.raises(StepFailed, match=r"nothing was updated; rank \d"):
                engine.step(*batch(0))
            faults.clear()
            return engine.step(*batch(1)).loss

    losses = run_threads(ranks, main)
    assert len(set(losses)) == 1 and np.isfinite(losses[0])


@pytest.mark.parametrize("what", ["forward", "backward", "token", "length", "target"])
def test_an_error_on_one_rank_is_raised_on_all(what):
    """Nothing is updated, and the training goes on."""

    def main(comm):
        made, loss = model(), nn.SoftmaxCrossEntropy()
        made.items[2].items[1].inner.items[1].experts.experts[4] = faulty = Faulty(WIDTH, WIDTH)
        with Engine(made, loss, comm, SGD(lr=0.1), **options(mesh="dp=3,ep=3", layout="zero1")) as engine:
            before = engine.state_dict()
            x, y = (one.copy() for one in batch(0))
            if what == "length":
                mine = [(0, *batch(0, 1, LENGTH + 1), [0])] if comm.Get_rank() == 1 else []
                arguments = (mine,)
            else:
                faulty.fault = what
                arguments = x, y
                x[6, 0], y[6, 0] = (TOKENS if what == "token" else 0), (TOKENS if what == "target" else 0)
            with pytest.raises(StepFailed, match="nothing was updated; rank"):
                engine.step(*arguments)
            faulty.fault = ""
            after = engine.state_dict()
            assert all(np.array_equal(before[name], after[name]) for name in before)
            return engine.step(*batch(1)).loss

    losses = run_threads(3, main)
    assert len(set(losses)) == 1 and np.isfinite(losses[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"compress": "int8"}, "compress: int8 is not for experts on different ranks; found dp=2,ep=2"),
        ({"pool": True}, "pool: True is not for experts on different ranks"),
        ({"prune": 0.5, "steps": 10}, "prune: 0.5 is not for experts on different ranks"),
        (
            {"mesh": "dp=2,ep=3"},
            "expected ep to be a divisor of the 2 ranks along dp, found dp=2,ep=3; ep=2 would fit",
        ),
        (
            {"dispatch": "hierarchical", "mesh": "dp=2"},
            "dispatch: hierarchical is for replicas that share experts, by ep; found dp=2",
        ),
        ({"dispatch": "direct:int8", "reproducible": True}, "dispatch: reproducible training needs direct, found"),
        (
            {"mesh": "cp=2,ep=2", "sequence_parts": 4},
            "sequence_parts: mixtures of experts take one part on each rank, found 2",
        ),
        ({"layout": "pp:pipedream", "mesh": "pp=2,dp=2,ep=2"}, "pipedream is for one pipeline, with replicas by stage"),
        (
            {"mesh": "tp=2,ep=2", "dispatch": "hierarchical"},
            "is for replicas that share experts, by ep; found tp=2,ep=2",
        ),
        ({"mesh": "tp=2,etp=2", "expert_shards": 1}, "expert_shards: expected 2, for tp=2,etp=2; found 1"),
        (
            {"mesh": "tp=2,ep=2", "expert_shards": 3},
            "expected a divisor of the 1 tensor_shards of a rank, for tp=2,ep=2",
        ),
        (
            {"mesh": "tp=2", "expert_shards": 2, "tensor_shards": 4},
            "expert_shards: parts of experts are for meshes with ep or etp; found 2 and tp=2",
        ),
        ({"mesh": "tp=2,ep=2", "compress": "int8"}, "compress: int8 is not for experts on different ranks"),
        ({"dispatch": "by pigeon"}, "dispatch: expected direct or hierarchical"),
        ({"layout": "local", "tau": 2}, "mesh: it belongs to dp-naive"),
        ({"layout": "ps"}, "mesh: it belongs to dp-naive"),
    ],
)
def test_refused_settings(changed, message):
    def main(comm):
        with pytest.raises(ValueError, match=message):
            Engine(model(), nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1), **{"mesh": "dp=2,ep=2", **changed})

    run_threads(4 if changed.get("mesh", "").count("=2") == 3 else 2, main)


def unnamed():
    """Model whose table of cuts does not name its mixture."""
    made = model()
    made.cuts = {name: style for name, style in made.cuts.items() if style != "experts"}
    return made


@pytest.mark.parametrize("mesh", ["tp=2,ep=2", "tp=2,etp=2"])
@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda: nn.mlp([WIDTH, WIDTH, WIDTH]), "this one has none"), (unnamed, "mixtures in its table `cuts`")],
)
def test_shards_of_a_model_without_experts(make, message, mesh):
    def main(comm):
        with pytest.raises(ValueError, match=message):
            Engine(make(), nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1), mesh=mesh)

    run_threads(2, main)


@pytest.mark.parametrize("layout, mesh, shards", [("dp", "dp=2", 2), ("zero1", "tp=2", 1), ("pp:1f1b", "pp=2", 2)])
def test_parts_of_experts_in_a_dense_model(layout, mesh, shards):
    options = {"layout": layout, "mesh": mesh, "expert_shards": shards, "tensor_shards": 2}

    def main(comm):
        made = transformer(TOKENS, LENGTH, 1, 2, WIDTH)
        with pytest.raises(
            ValueError, match=f"expert_shards: {shards} is for models with mixtures of experts; found none"
        ):
            Engine(made, nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1), **options)

    run_threads(2, main)


def test_fewer_experts_than_ranks():
    """Ranks without an expert of a mixture, along tp and among replicas."""
    changed = {"reproducible": False, "precision": "fp64", "mesh": "tp=2,dp=2,ep=4"}
    layers = ExpertLayers(1, RouterSettings(choices=1, normalize=False, balance_loss=0.1))

    def main(comm, **options):
        made = transformer(TOKENS, LENGTH, 1, 2, WIDTH, experts=layers)
        with Engine(made, nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1), batch=7, micro_batch=2, **options) as engine:
            return engine.step(*batch(0)).norm

    expected = run_threads(1, lambda comm: main(comm, precision="fp64"))[0]
    assert run_threads(4, lambda comm: main(comm, **changed)) == pytest.approx([expected] * 4, rel=1e-12)


@pytest.mark.parametrize("optimizer", [SGD, LAMB])
@pytest.mark.parametrize(("mesh", "experts"), [("dp=4,ep=4", 3), ("dp=2,ep=2", 1)])
def test_experts_as_the_last_parameters(mesh, experts, optimizer):
    """Some ranks have no expert: the first parameters in one group, where others have two groups, or all."""

    def main(comm, **options):
        router = Router(WIDTH, experts, RouterSettings(choices=1, normalize=False))
        mixture = MixtureOfExperts(router, [Linear(WIDTH, WIDTH) for _ in range(experts)])
        made = nn.Sequential([Linear(WIDTH, WIDTH), mixture])
        with Engine(made, nn.MSE(), comm, optimizer(lr=0.1), precision="fp64", batch=8, **options) as engine:
            x = np.random.default_rng(0).standard_normal((2, 8, WIDTH))
            return [engine.step(x[0], x[1]).norm for _ in range(2)]

    expected = run_threads(1, main)[0]
    for found in run_threads(Mesh.parse(mesh).size, lambda comm: main(comm, mesh=mesh)):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("mesh", "copies"), [("dp=2,ep=2", 2), ("dp=2,tp=2,ep=4", 2), ("dp=2,tp=2,ep=2,etp=2", 4)])
def test_traffic_of_all_ranks(mesh, copies):
    """Every token to two of four experts on the other replica; with parts of experts along tp, to both parts."""
    layers = ExpertLayers(4, RouterSettings(choices=4), every=2)

    def main(comm):
        made = transformer(TOKENS, LENGTH, 2, 2, WIDTH, experts=layers)
        with Engine(made, nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1), mesh=mesh, batch=6) as engine:
            report = engine.step(*batch(0, 6))
            tokens = 6 * LENGTH
            assert report.traffic["2.1.inner.1.experts copies"] == copies * tokens
            assert report.counts["2.1.inner.1.router chosen"] == [tokens] * 4

    run_threads(Mesh.parse(mesh).size, main)


def shared_weight():
    experts = [Linear(WIDTH, WIDTH) for _ in range(2)]
    experts[1].weight = experts[0].weight
    return nn.Sequential([MixtureOfExperts(Router(WIDTH, 2), experts)])


REFUSED_MODELS = {
    "ep and etp divide the experts of a model, and this one has none": lambda: nn.mlp([WIDTH, WIDTH]),
    "0.experts.0.weight is used 2 times": shared_weight,
    r"maps \(1, 8\) to the same shape, found \(1, 9\)": lambda: nn.Sequential(
        [MixtureOfExperts(Router(WIDTH, 2), [Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH + 1)])]
    ),
}


@pytest.mark.parametrize("message", REFUSED_MODELS)
def test_refused_models(message):
    def main(comm):
        with pytest.raises(ValueError, match=message):
            Engine(REFUSED_MODELS[message](), nn.MSE(), comm, SGD(lr=0.1), mesh="dp=2,ep=2")

    run_threads(2, main)


@pytest.mark.parametrize("mesh", ["dp=2,ep=2", "dp=1,tp=2", "pp=2"])
def test_selection_biases_are_in_a_dictionary_of_weights(mesh):
    """Required with the weights, and set with them: another engine evaluates the same."""

    def main(comm):
        options = {"mesh": mesh, "layout": "pp:1f1b" if "pp" in mesh else "dp", "precision": "fp64"}
        loss, settings = nn.SoftmaxCrossEntropy(), RouterSettings(scores="sigmoid", bias_rate=0.5)

        def engine():
            made = transformer(TOKENS, LENGTH, 2, 2, WIDTH, experts=ExpertLayers(4, settings))
            return Engine(made, loss, comm, SGD(lr=0.1), batch=7, micro_batch=2, **options)

        with engine() as one, engine() as other:
            one.step(*batch(0))
            found, names = one.state_dict(), ["1.1.inner.1.router.bias", "2.1.inner.1.router.bias"]
            assert list(found)[-2:] == names and all(found[name].any() for name in names)
            with pytest.raises(ValueError, match="missing are"):
                other.load_state_dict({name: values for name, values in found.items() if name not in names})
            with pytest.raises(ValueError, match=r"router\.bias: expected an array of shape"):
                other.load_state_dict({**found, names[0]: np.zeros(3)})
            assert not any(other.state_dict()[name].any() for name in names)
            other.load_state_dict(found)
            again = other.state_dict()
            assert list(again) == list(found) and all((again[name] == found[name]).all() for name in found)
            found[names[0]][:] = 9  # a copy
            assert other.evaluate(*batch(1)).loss == one.evaluate(*batch(1)).loss

    run_threads(2, main)
