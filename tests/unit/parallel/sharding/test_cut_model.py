"""Models cut into shards against the whole model in float64, on ranks that are threads: values, exchanges, bits."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.cut_models import CASES, CONTEXT, TOKENS, expect_close, one_pass
from support.thread_ranks import run

from parallel.nn.flat_params import FlatParams
from parallel.nn.gated import gated_transformer
from parallel.nn.kernels.storage import BFLOAT16
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import convnet, mlp, transformer
from parallel.nn.operator import PassMode, name_all
from parallel.nn.placement import Copies, Partial, PlacementError, Replicate, Shard
from parallel.nn.rewrite import operators_in
from parallel.sharding.device_mesh import MeshAxis
from parallel.sharding.tensor.check import check_placements
from parallel.sharding.tensor.cut_model import cut
from parallel.sharding.tensor.grouped_shards import GroupedShards
from parallel.sharding.tensor.vocabulary import VocabularyCrossEntropy


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), (2, 2), (3, 3), (4, 4), (8, 8), (1, 4), (2, 4), (3, 6), (4, 8)])
def test_a_cut_model_equals_the_whole(case, ranks, shards):
    case = CASES[case]
    whole = one_pass(case, case.make(), case.loss())

    def rank_main(axis):
        model, loss = cut(case.make(), case.loss(), axis, shards)
        check_placements(model, loss, {"dp": Shard(0), "tp": Replicate()}, {"dp"})
        found = one_pass(case, model, loss)
        expect_close(found, model, whole, 1e-12)
        scores = loss.whole(found.scores) if hasattr(loss, "whole") else found.scores
        np.testing.assert_allclose(scores, whole.scores, rtol=1e-12, atol=1e-12)
        return {parameter.label: parameter for parameter in model.parameters()}

    held = run(ranks, rank_main)
    sizes = dict.fromkeys(whole.gradients, 0)
    for part in {key: part for parts in held for key, part in parts.items()}.values():
        sizes[part.name] += part.size
    assert sizes == {name: gradient.size for name, gradient in whole.gradients.items()}


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanges_are_those_of_the_formulas(layers, ranks):
    """One allreduce forward and one backward for each half-block, embedding and head; three of a value per target."""
    batch, width = 3, 16

    def rank_main(axis):
        model, loss = cut(transformer(TOKENS, CONTEXT, layers, 4, width), SoftmaxCrossEntropy(), axis)
        one_pass(CASES["gpt"], model, loss)
        return axis.comm.calls

    values = batch * CONTEXT * 8
    activations = values * width
    forward, backward = [activations] * (1 + 2 * layers), [activations] * (1 + 2 * layers)
    expected = [("allreduce", nbytes) for nbytes in [*forward, *[values] * 3, *backward]]
    assert run(ranks, rank_main) == [expected] * ranks


@pytest.mark.parametrize("leaves_node", [True, False])
def test_weights_are_computed_while_dx_is_summed(leaves_node):
    """The sum is started before the gradients of weights, where it leaves a node, and complete after them."""

    def rank_main(axis):
        events = []

        def allreduce(send, receive, algorithm=None, op=None):
            events.append("sum")
            axis.comm.Allreduce(send, receive)

        def iallreduce(*args, algorithm):
            events.append("start")
            return SimpleNamespace(Wait=lambda: allreduce(*args))

        nodes = (0, 1) if leaves_node else None
        comm = SimpleNamespace(nodes=nodes, Allreduce=allreduce, Iallreduce=iallreduce)
        column = cut(mlp([4, 4, 4]), SoftmaxCrossEntropy(), axis._replace(comm=comm))[0].items[0].items[1]
        flat = FlatParams(column)
        flat.bind(np.ones(flat.length))
        column.inner.items[0].inner.operators[0].first = False
        _, saved = column.forward(np.ones((2, 4)), PassMode())
        dx = column.backward(np.ones((2, 2)), saved, lambda parameter, compute: events.append("weight"))
        np.testing.assert_array_equal(dx, np.full((2, 4), 4.0))
        return events

    expected = ["start"] * leaves_node + ["weight", "weight", "sum"]
    assert run(2, rank_main) == [expected] * 2


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["f4", "bf16", "f2"])
def test_the_same_bits_on_any_number_of_ranks(case, dtype):
    case, dtype = CASES[case], BFLOAT16 if dtype == "bf16" else np.dtype(dtype)

    def rank_main(axis):
        model, loss = cut(case.make(), case.loss(), axis, 4, "tree")
        found = one_pass(case, model, loss, dtype)
        return found.loss, found.gradients

    (expected, gradients), *_ = run(1, rank_main)
    for ranks in (2, 4):
        for loss, found in run(ranks, rank_main):
            assert loss == expected
            for name, gradient in found.items():
                assert gradient.tobytes() == gradients[name].tobytes(), name


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("extreme", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_extreme_scores(ranks, extreme, smoothing):
    random = np.random.default_rng(1)
    scores, targets = random.normal(size=(2, 5, 7)), random.integers(-2, 7, (2, 5))
    scores[..., 3] += extreme
    whole = SoftmaxCrossEntropy(smoothing)
    total, saved = whole.forward(scores, targets)
    gradient = whole.backward(0.25, saved)

    def rank_main(axis):
        units = [7 // ranks + (rank < 7 % ranks) for rank in range(ranks)]
        loss = VocabularyCrossEntropy(axis, units, whole=SoftmaxCrossEntropy(smoothing))
        part = slice(sum(units[: axis.rank]), sum(units[: axis.rank + 1]))
        found, saved = loss.forward(np.ascontiguousarray(scores[..., part]), targets)
        assert found == pytest.approx(total, rel=1e-12)
        np.testing.assert_allclose(loss.backward(0.25, saved), gradient[..., part], rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(loss.whole(scores[..., part]), scores)
        assert loss.count(targets) == whole.count(targets)

    run(ranks, rank_main)


# ------------------------------------------------------------------------------------------ refusals


def cut_alone(model, shards=2, loss=None):
    """The model cut, on one rank."""
    return run(1, lambda axis: cut(model, loss or SoftmaxCrossEntropy(), axis, shards))[0]


@pytest.mark.parametrize(
    ("model", "shards", "message"),
    [
        (convnet((1, 8, 8), 3), 2, "expected a model with a table `cuts`"),
    ],
)
def test_models_that_cannot_be_cut(model, shards, message):
    with pytest.raises(PlacementError, match=message):
        cut_alone(model, shards)


def test_shards_that_the_ranks_do_not_share():
    with pytest.raises(PlacementError, match=r"expected a multiple of the 2 ranks along tp, found 3"):
        run(2, lambda axis: cut(mlp([4, 4, 4]), SoftmaxCrossEntropy(), axis, 3))


def changed(cuts):
    """A transformer with another table."""
    model = transformer(9, 4, 1, 2, 8)
    model.cuts = {name: style for name, style in {**model.cuts, **cuts}.items() if style}
    return model


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ({"7.1": "row"}, "expected names of operators of the model, found 7.1"),
        ({"*.0.inner.2": "row"}, "'row' is for Linear, found CausalAttention 1.0.inner.2"),
        ({"*.0.inner.1": "diagonal"}, "'diagonal' is for one of"),
        ({"2.1": ""}, "0.0.weight is cut in one operator and whole in another"),
        ({"*.1.inner.3": ""}, "Linear 1.1.inner.3: expected another placement along tp, found a value sharded"),
        ({"*.1.inner.1": ""}, "Shards .*: expected a value sharded along dimension -1 .* along tp, found a replicated"),
        (
            {"*.0.inner.2": ""},
            "CausalAttention 1.0.inner.2: expected another placement along tp, found a value",
        ),
    ],
)
def test_tables_that_do_not_fit(cuts, message):
    with pytest.raises(PlacementError, match=message):
        cut_alone(changed(cuts))


def test_a_partial_sum_used_as_a_value():
    model, _ = cut_alone(mlp([4, 4, 4]))
    row = model.items[1].items[0]
    row.inner.items = [item for item in row.inner.items if type(item).__name__ != "SumShards"]
    with pytest.raises(PlacementError, match=r"AddBias .*: expected another placement along tp, found a partial sum"):
        model.place("tp", Replicate(), set())


def test_a_missing_f():
    model, _ = cut_alone(mlp([4, 4, 4]))
    column = model.items[0].items[1]
    column.inner.items = [item.inner for item in column.inner.items]
    with pytest.raises(PlacementError, match=r"expected a replicated value whose gradient is a partial sum along tp"):
        model.place("tp", Replicate(), set())


def test_a_gradient_that_is_not_summed():
    model, loss = mlp([4, 4, 4]), SoftmaxCrossEntropy()
    name_all(model)
    with pytest.raises(PlacementError, match=r"Linear 0.1: the gradient of 0.1.weight is a partial sum along dp"):
        check_placements(model, loss, {"dp": Shard(0)}, ())
    partial = check_placements(model, loss, {"dp": Shard(0), "tp": Replicate()}, {"dp"})
    assert partial == {"dp": set(model.parameters()), "tp": set()}


def test_gradients_of_copies_that_are_not_summed():
    """Two of four ranks have copies of each key/value head; the gradient of no copy is whole without `SumCopies`."""
    axis = MeshAxis("tp", 1, 4, None)
    model, loss = cut(gated_transformer(9, 4, 1, 4, 8, kv_heads=2), SoftmaxCrossEntropy(), axis)
    (grouped,) = (one for one in operators_in(model) if isinstance(one, GroupedShards))
    assert {one.placement for one in grouped.shared[0].parameters()} == {Copies(1, range(2))}
    assert not check_placements(model, loss, {"tp": Replicate()}, ())["tp"]
    grouped.sums = None
    with pytest.raises(PlacementError, match=r"the gradient of 1.0.inner.1.weight is a partial sum along tp, not"):
        check_placements(model, loss, {"tp": Replicate()}, ())
    alone, loss = cut(gated_transformer(9, 4, 1, 4, 8, kv_heads=2), loss, axis._replace(rank=0, size=1), 4)
    (grouped,) = (one for one in operators_in(alone) if isinstance(one, GroupedShards))
    grouped.sums = None  # one rank has no copies
    assert not check_placements(alone, loss, {"tp": Replicate()}, ())["tp"]


def test_a_loss_of_other_scores():
    model, loss = cut_alone(transformer(9, 4, 1, 2, 8))
    with pytest.raises(PlacementError, match="SoftmaxCrossEntropy: expected a replicated value along tp"):
        check_placements(model, SoftmaxCrossEntropy(), {"tp": Replicate()}, ())
    with pytest.raises(PlacementError, match=r"VocabularyCrossEntropy: expected a value sharded .* a partial sum"):
        loss.place("tp", Partial())
