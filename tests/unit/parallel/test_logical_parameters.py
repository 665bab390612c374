"""Properties of parameters in layouts that cut tensors: those of one rank with whole tensors. Ranks are threads."""

import numpy as np
import pytest
from conformance.thread_communicator import run_threads
from support.property_cases import CASES, batch, chosen, expect_equal, model, trained

from parallel import SGD, Engine
from parallel.nn.flat_params import FlatParams
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import mlp
from parallel.nn.operator import name_all
from parallel.nn.parameter import ParameterShard
from parallel.runtime import consistency_check
from parallel.runtime.consistency_check import ParameterMismatch, RankMismatch, StepFailed
from parallel.sharding.device_mesh import MeshAxis
from parallel.sharding.mesh import Mesh
from parallel.sharding.tensor.cut_model import cut

SLOW = pytest.mark.full
LAYOUTS = {
    "tensor_shards=2": {"tensor_shards": 2},
    "expert_shards=2": {"tensor_shards": 2, "expert_shards": 2},
    "tp=2": {"mesh": "tp=2"},
    "tp=2 of 4 shards": {"mesh": "tp=2", "tensor_shards": 4},
    "tp=2 by sequence": {"mesh": "tp=2", "sequence_parallel": True},
    "tp=2,zero3": {"mesh": "tp=2", "layout": "zero3", "micro_batch": 4},
    "tp=4": {"mesh": "tp=4"},
    "dp=2,ep=2": {"mesh": "dp=2,ep=2"},
    "tp=2,etp=2": {"mesh": "tp=2,etp=2"},
    "tp=4,ep=4": {"mesh": "tp=4,ep=4"},
    "tp=4,ep=2,etp=2": {"mesh": "tp=4,ep=2,etp=2"},
    "pp=2,tp=2": {"mesh": "pp=2,tp=2", "layout": "pp:1f1b", "microbatches": 1},
    "pp=2,tp=2 zb-h1": {"mesh": "pp=2,tp=2", "layout": "pp:zb-h1", "microbatches": 1},
    "dp=2,tp=2,zero1": {"mesh": "dp=2,tp=2", "layout": "zero1", "micro_batch": 4},
}
DEFAULT = ("tensor_shards=2", "tp=2", "tp=4,ep=2,etp=2", "pp=2,tp=2")
ALONE = {}


def ranks_of(settings):
    return Mesh.parse(settings["mesh"]).size if "mesh" in settings else 1


@pytest.mark.parametrize("layout", [pytest.param(one, marks=() if one in DEFAULT else SLOW) for one in LAYOUTS])
@pytest.mark.parametrize("case", CASES)
def test_properties_are_those_of_one_rank(case, layout):
    if case not in ALONE:
        ALONE[case] = run_threads(1, lambda comm: trained(comm, case))[0]
    settings = LAYOUTS[layout]
    expect_equal(run_threads(ranks_of(settings), lambda comm: trained(comm, case, **settings)), ALONE[case])


def test_a_shard_has_no_properties_of_its_own():
    whole = mlp([4, 6, 5])
    ours, _ = cut(whole, SoftmaxCrossEntropy(), MeshAxis("tp", 0, 1, None), 2)
    shards = [one for one in ours.parameters() if isinstance(one, ParameterShard)]
    assert len(shards) == 6 and {one.logical for one in shards} < set(whole.parameters())
    for shard in shards:
        shard.requires_grad, shard.decay = False, not shard.decay
        assert not shard.logical.requires_grad and shard.logical.decay == shard.decay
        assert shard.hooks is shard.logical.hooks and shard.name == shard.logical.name
        assert np.array_equal(shard.first(3), shard.cut.take(shard.logical.first(3)))
        shard.decay = not shard.decay


@pytest.mark.parametrize("settings", [{"tensor_shards": 2}, {"tensor_shards": 2, "expert_shards": 2}])
def test_names_are_those_of_the_model(settings):
    whole = model()
    expected = [one.name for one in name_all(model())]

    def rank_main(comm):
        with Engine(whole, SoftmaxCrossEntropy(), comm, SGD(lr=0.1), **settings) as engine:
            return [*engine.state_dict()], [one.name for one in whole.parameters()]

    assert run_threads(1, rank_main) == [(expected, expected)]


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,tp=2"])
def test_hooks_of_one_rank_are_refused(mesh):
    """Ranks that share a tensor exchange its gradient for the hooks, and none waits for the others."""
    layout = {"layout": "pp:1f1b", "microbatches": 1} if "pp" in mesh else {}

    def rank_main(comm):
        whole = model()
        with Engine(whole, SoftmaxCrossEntropy(), comm, SGD(lr=0.1), mesh=mesh, batch=4, **layout) as engine:
            handle = chosen(whole)[0].register_hook(np.negative) if comm.Get_rank() == 1 else None
            with pytest.raises(RankMismatch, match=r"gradient hooks: \{\}; rank 1 .*'0.0.weight': 1"):
                engine.step(*batch(0))
            if handle:
                handle.remove()
            assert np.isfinite(engine.step(*batch(0)).loss)

    run_threads(Mesh.parse(mesh).size, rank_main)


def test_shards_have_labels_of_their_own():
    """By which norms, comparisons of copies and compressors tell them apart."""
    ours, _ = cut(mlp([4, 6, 5]), SoftmaxCrossEntropy(), MeshAxis("tp", 0, 1, None), 2)
    labels = [one.label for one in ours.parameters()]
    assert labels[:4] == ["0.1.weight[0:3]", "0.1.bias[0:3]", "0.1.weight[3:6]", "0.1.bias[3:6]"]
    assert len(set(labels)) == len(labels) == len(FlatParams(ours).by_name)


def test_copies_of_every_shard_are_compared():
    def rank_main(comm):
        with Engine(model(), SoftmaxCrossEntropy(), comm, SGD(lr=0.1), tensor_shards=2, check_every=1) as engine:
            engine.step(*batch(0))
            shards = [one.parameter for one in engine.inner.flat.places if one.parameter.name == "1.0.inner.1.weight"]
            assert len(shards) == 2
            if comm.Get_rank() == 1:
                shards[0].data[1] += 0.5  # not the last one of its name
            with pytest.raises(ParameterMismatch, match=r"parameter 1.0.inner.1.weight\[\S+\] of rank 1 differs"):
                consistency_check.compare_parameters(comm, engine.inner.flat.places, 1)

    run_threads(2, rank_main)


@pytest.mark.parametrize("where", [0, 1, 5, 6])
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,tp=2"])
def test_a_hook_that_raises_on_one_rank(mesh, where):
    """No rank waits, nothing is updated, and the training goes on."""
    layout = {"layout": "pp:1f1b", "microbatches": 2} if "pp" in mesh else {"micro_batch": 2}

    def rank_main(comm):
        whole = model()

        def hook(gradient):
            if comm.Get_rank() % 2:
                raise ValueError("it is broken")

        with Engine(whole, SoftmaxCrossEntropy(), comm, SGD(lr=0.1), mesh=mesh, batch=4, **layout) as engine:
            before, handle = engine.state_dict(), chosen(whole)[where].register_hook(hook)
            expected = r"nothing was updated; rank \d: ValueError: it is broken .*in a hook of"
            with pytest.raises(StepFailed, match=expected):
                engine.step(*batch(0))
            handle.remove()
            after = engine.state_dict()
            assert all((after[name] == before[name]).all() for name in before)
            assert np.isfinite(engine.step(*batch(0)).loss)

    run_threads(Mesh.parse(mesh).size, rank_main)


@pytest.mark.parametrize("layout", ["dp", "zero3", "pp:1f1b", "pp:pipedream"])
def test_a_hook_that_raises_where_nothing_is_cut(layout):
    """A stage that updates on the way makes no update with the gradient of the hook."""

    def rank_main(comm):
        whole = mlp([4, 6, 5])
        x, y = np.random.default_rng(0).normal(size=(8, 4)), np.arange(8) % 5
        with Engine(whole, SoftmaxCrossEntropy(), comm, SGD(lr=0.1), layout=layout, batch=8) as engine:
            before = engine.state_dict()
            handle = whole.parameters()[0].register_hook(lambda gradient: gradient.no_such_attribute)
            with pytest.raises(StepFailed, match=r"AttributeError: .*in a hook of 0.1.weight"):
                engine.step(x, y)
            after = engine.state_dict()
            assert all((after[name] == before[name]).all() for name in before if name.startswith("0.1"))
            handle.remove()
            assert np.isfinite(engine.step(x, y).loss)

    run_threads(2, rank_main)


@pytest.mark.parametrize(
    "hook",
    [np.sum, lambda gradient: gradient.sum(0), np.any, lambda gradient: True, lambda gradient: gradient * 1j],
    ids=["sum", "row", "any", "bool", "complex"],
)
@pytest.mark.parametrize("settings", [{"layout": "dp"}, {"layout": "zero3"}, {"mesh": "tp=2"}], ids=str)
def test_a_result_of_a_hook_that_is_no_gradient(settings, hook):
    """It is not spread over the gradient, nor is a part of it dropped."""

    def rank_main(comm):
        whole = mlp([4, 6, 5])
        x, y = np.random.default_rng(0).normal(size=(8, 4)), np.arange(8) % 5
        with Engine(whole, SoftmaxCrossEntropy(), comm, SGD(lr=0.1), batch=8, **settings) as engine:
            handle = whole.parameters()[0].register_hook(hook)
            with pytest.raises(StepFailed, match=r"nothing was updated; .*Error: hook: expected an array .*0.1.weight"):
                engine.step(x, y)
            handle.remove()
            assert np.isfinite(engine.step(x, y).loss)

    run_threads(2, rank_main)


def seen_by_hooks(comm, **settings):
    """Gradients of every parameter of a hidden layer of one unit, by name."""
    whole, seen = mlp([4, 1, 5]), {}
    x, y = np.random.default_rng(0).normal(size=(8, 4)), np.arange(8) % 5
    optimizer = SGD(lr=0.1)
    with Engine(whole, SoftmaxCrossEntropy(), comm, optimizer, batch=8, precision="fp64", **settings) as engine:
        for one in whole.parameters():
            one.register_hook(lambda gradient, one=one: seen.update({one.name: gradient.copy()}))
        engine.step(x, y)
    return seen


@pytest.mark.parametrize("settings", [{"mesh": "tp=3"}, {"tensor_shards": 3}], ids=str)
def test_hooks_of_tensors_with_fewer_units_than_shards(settings):
    """One shard has all of the tensor, and the others nothing; all ranks call the hook with the same gradient."""
    (expected,) = run_threads(1, seen_by_hooks)
    for seen in run_threads(ranks_of(settings), lambda comm: seen_by_hooks(comm, **settings)):
        assert seen.keys() == expected.keys() and len(seen) == 4
        for name, gradient in seen.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-12, err_msg=name)
