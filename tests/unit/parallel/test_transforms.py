"""Products in few bits, fake quantisation and pruning: what a pass computes, its gradients, what is refused."""

import numpy as np
import pytest
from mpi4py import MPI

from parallel.engine.settings import Settings
from parallel.nn.activation import ReLU
from parallel.nn.compose import Sequential
from parallel.nn.conv import Conv2d
from parallel.nn.embedding import Embedding, Unembedding
from parallel.nn.flat_params import FlatParams
from parallel.nn.gradcheck import check
from parallel.nn.linear import Linear
from parallel.nn.models import build, mlp
from parallel.nn.operator import Operator, PassMode, name_all
from parallel.nn.transforms import few_bit_product
from parallel.nn.transforms.fake_quantized_input import FakeQuantizedInput, MovingRanges, checked_ranges
from parallel.nn.transforms.few_bit_product import PRODUCTS, FewBitProduct
from parallel.nn.transforms.pruning import Pruning
from parallel.nn.transforms.weight_transform import TransformedWeight, rounding_to
from parallel.trainer.model_transforms import prune, transformed
from parallel.trainer.recipes import complete
from quant import INT8, PerGroup, QuantSpec, parse, quantize

F = np.float32
MULTIPLYING = {
    "linear": (lambda: Linear(5, 3), (4, 2, 5)),
    "without bias": (lambda: Linear(5, 3, bias=False), (4, 5)),
    "convolution": (lambda: Conv2d(2, 3, 3, stride=2, padding=1), (2, 2, 5, 6)),
    "unembedding": (lambda: Unembedding(Embedding(6, 4)), (3, 4)),
}
multiplying = pytest.mark.parametrize("name", MULTIPLYING)


def bound(operator, values=None, dtype=F):
    """The operator with values in its parameters: small integers, or its own first values."""
    for parameter in name_all(operator):
        whole = np.arange(parameter.size).reshape(parameter.shape) * 7 % 17 - 8.0
        parameter.data = (whole if values is None else values * parameter.first(0)).astype(dtype)
    return operator


def passes(operator, x, step=0, training=True):
    """(y, dx, gradients by name) for a dy of small integers."""
    run, gradients = PassMode(training, step=step, samples=np.arange(len(x))), {}

    def sink(parameter, compute):
        out = np.empty(parameter.shape, F)
        compute(out)
        gradients[parameter.name] = gradients.get(parameter.name, 0) + out

    y, saved = operator.forward(x, run)
    dy = (np.arange(y.size).reshape(y.shape) * 5 % 13 - 6).astype(x.dtype)
    return y, operator.backward(dy, saved, sink), gradients


def whole_numbers(shape):
    return (np.arange(np.prod(shape)).reshape(shape) * 11 % 15 - 7).astype(F)


def equal(found, expected):
    assert np.array_equal(found[0], expected[0]) and np.array_equal(found[1], expected[1])
    assert found[2].keys() == expected[2].keys()
    assert all(np.array_equal(found[2][name], expected[2][name]) for name in expected[2])


@multiplying
def test_products_without_rounding_have_the_right_gradients(monkeypatch, name):
    make, shape = MULTIPLYING[name]
    monkeypatch.setattr(few_bit_product, "rounded", lambda x, spec, axis: x)
    check(FewBitProduct(make(), PRODUCTS["fp8"]), np.random.default_rng(0).standard_normal(shape))


@multiplying
def test_numbers_that_have_codes_give_the_operators_own_results(name):
    """All are whole and below 16, and a power of two times a number of four bits."""
    make, shape = MULTIPLYING[name]
    operator, x = bound(make()), whole_numbers(shape)
    equal(passes(FewBitProduct(operator, PRODUCTS["mxfp8"]), x), passes(operator, x))


def test_blocks_are_along_the_axis_that_is_summed_over():
    operator = bound(Linear(200, 150), 1.0)
    x = np.random.default_rng(0).standard_normal((140, 200)).astype(F)
    y, dx, gradients = passes(FewBitProduct(operator, PRODUCTS["fp8"]), x)
    dy, w, spec = (np.arange(y.size).reshape(y.shape) * 5 % 13 - 6).astype(F), operator.weight.data, PRODUCTS["fp8"]

    def codes(x, one):
        return quantize(np.ascontiguousarray(x), one).dequantize()

    assert np.array_equal(y, codes(x, spec.inputs) @ codes(w.T, spec.weights).T + operator.bias.data)
    assert np.array_equal(dx, codes(dy, spec.gradients) @ codes(w, spec.weights).T)
    expected = codes(dy.T, spec.gradients) @ codes(x.T, spec.inputs).T
    assert np.allclose(gradients["weight"], expected.T, rtol=1e-6, atol=1e-4)
    assert not np.allclose(y, x @ w + operator.bias.data, rtol=1e-3)


def test_a_gradient_that_overflowed_stays_no_number():
    operator = bound(Linear(4, 3))
    made = FewBitProduct(operator, PRODUCTS["fp8"])
    _, saved = made.forward(whole_numbers((2, 4)), PassMode())
    found = []
    dx = made.backward(np.array([[1, np.inf, 2], [1, 1, 1]], F), saved, lambda p, compute: found.append(p))
    assert np.isnan(dx[0]).all() and np.isfinite(dx[1]).all()


@multiplying
def test_gradients_of_rounded_weights_are_those_of_the_weights(name):
    make, shape = MULTIPLYING[name]
    spec, x = parse("int3"), whole_numbers(shape)
    operator, plain = bound(make(), 1.0), bound(make(), 1.0)
    made = TransformedWeight(operator, [rounding_to(spec, "weight")], name in ("linear", "without bias"))
    plain.weight.data = quantize(plain.weight.data, spec).dequantize()
    assert not np.array_equal(plain.weight.data, operator.weight.data)
    equal(passes(made, x), passes(plain, x))
    assert made.members and [p.name for p in made.parameters()] == [p.name for p in operator.parameters()]


def test_equal_weights_are_rounded_with_random_numbers_of_their_own():
    spec, matrix = QuantSpec(4, granularity=PerGroup(32), rounding="stochastic"), np.linspace(-1, 1, 512, dtype=F)[None]
    found = {rounding_to(spec, name)(matrix, step).tobytes() for name in ("0.weight", "1.weight") for step in (0, 1)}
    assert len(found) == 4 and rounding_to(spec, "0.weight")(matrix, 0).tobytes() in found


def test_inputs_are_rounded_from_the_second_step_on():
    operator = bound(Linear(4, 3))
    made = FakeQuantizedInput(operator, parse("int8_zero"), rate=0.25)
    first, second = np.array([[-1, 0, 2, 3]], F), np.array([[-5, 0, 1, 1.003]], F)
    equal(passes(made, first), passes(operator, first))
    moving = MovingRanges([made])
    runs = [noted(made, first[:, :2], first[:, 2:]), noted(made)]
    moving.end_step(runs, MPI.COMM_SELF)
    assert made.range.state() == moving.state()[""] == [-1, 3]
    y, dx, _ = passes(made, second)
    given = made.range.parameters
    rounded = quantize(second, made.range.spec, **given).dequantize()
    assert np.array_equal(y, operator.forward(rounded, PassMode())[0]) and rounded[0, 0] > -1.01
    assert dx[0, 0] == 0 and np.array_equal(dx[:, 1:], passes(operator, rounded)[1][:, 1:])
    moving.end_step([noted(made, second), noted(made, 100 * second, training=False)], MPI.COMM_SELF)
    assert made.range.state() == [0.25 * -5 + 0.75 * -1, F(0.25 * F(1.003) + 0.75 * 3)]
    again = FakeQuantizedInput(operator, parse("int8_zero"))
    again.range.load(made.range.state())
    assert again.range.state() == made.range.state() and again.range.parameters == made.range.parameters


def noted(operator, *inputs, training=True):
    """Pass in which the operator was used once for each of the inputs."""
    run = PassMode(training)
    for x in inputs:
        operator.forward(np.resize(x, (1, 4)), run)
    return run


@pytest.mark.parametrize(
    "state",
    [[], {"0": 1}, {"0": [1.0]}, {"0": [2.0, 1.0]}, {"0": [0.0, float("nan")]}, {"0": [0, 1e39]}, {"0": [0, 10**400]}],
    ids=lambda state: f"{state!s:.20}",
)
def test_ranges_of_a_checkpoint_that_are_none(state):
    with pytest.raises(ValueError, match=r"^ranges: expected"):
        checked_ranges(state)


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.9, 0.999])
def test_as_many_are_pruned_as_asked_for(sparsity):
    matrix = np.random.default_rng(0).standard_normal((20, 33)).astype(F)
    mask = Pruning(sparsity).mask(matrix, 0)
    assert (~mask).sum() == round(sparsity * 660)
    assert abs(matrix[~mask]).max(initial=0) <= abs(matrix[mask]).min()
    rows = Pruning(sparsity, "rows").mask(matrix, 0)
    assert (~rows).all(axis=1).sum() == round(sparsity * 20) and rows.sum() % 33 == 0
    assert Pruning(sparsity).mask(np.ones((3, 4), F), 0).sum() == 12 - round(sparsity * 12)  # all alike
    assert Pruning(sparsity).mask(np.ones((0, 4), F), 0).shape == (0, 4)


def test_some_of_so_many_neighbours_stay():
    matrix = np.random.default_rng(0).standard_normal((5, 10)).astype(F)
    mask = Pruning(0.5, "2:4").mask(matrix, 0)
    assert (mask[:, :8].reshape(5, 2, 4).sum(axis=2) == 2).all() and mask[:, 8:].all()
    assert np.array_equal(mask[0, :4], abs(matrix[0, :4]) >= np.sort(abs(matrix[0, :4]))[2])


def test_a_pruned_model_has_zeros_and_gradients_for_all():
    model, settings = mlp([20, 16, 4]), Settings(prune=0.75)
    FlatParams(model)
    bound(model, 1.0)
    made, x = transformed(model, settings, steps=10), whole_numbers((8, 20))
    assert list(FlatParams(made).by_name) == list(FlatParams(model).by_name)
    bound(model, 1.0)
    dense, early, late = (passes(one, x, step) for one, step in ((model, 0), (made, 0), (made, 5)))
    equal(early, dense)
    assert (late[2]["0.1.weight"] != 0).mean() > 0.5
    prune(model, settings, 10, 7)
    assert [(p.data == 0).mean() for p in model.parameters() if p.decay] == [0.75, 0.75]
    assert np.array_equal(passes(model, x)[0], late[0])


def test_rows_of_the_last_product_and_tables_are_not_pruned():
    model = build("gpt:tiny", (8,), 256)
    bound(model, 1.0)
    before = {parameter.name: parameter.data.copy() for parameter in model.parameters()}
    prune(model, Settings(prune=0.5, prune_pattern="rows"), 0, 0)
    changed = {p.name for p in model.parameters() if not np.array_equal(p.data, before[p.name])}
    assert changed and all(name.endswith("weight") for name in changed)
    assert not [name for name in changed if name.startswith("0.") or name == "2.1.inner.3.weight"]


def test_without_transforms_nothing_is_copied():
    model = Sequential([Linear(3, 3), ReLU()])
    assert transformed(model, Settings(), 10) is model


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"products": "fp7"}, "products: expected one of stored, fp8, mxfp8; found 'fp7'"),
        ({"products": "fp8", "fake_quant": "int4"}, "products: fp8 and fake quantisation"),
        ({"fake_quant": "int44"}, "fake_quant: no spec 'int44'"),
        ({"fake_quant_inputs": "int4_g32"}, "fake_quant_inputs: spec: expected linear codes with one scale"),
        ({"prune_pattern": "4:2"}, "prune_pattern: expected elements, rows, or N:M"),
        ({"prune_pattern": "2:4", "prune": 0.8}, "prune: expected 0.5, as 2:4 prunes"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(settings, words):
    with pytest.raises(ValueError, match=words):
        transformed(mlp([4, 4, 2]), Settings(**settings), 10)


@pytest.mark.parametrize("sparsity", [-0.1, 1.0])
def test_sparsities_out_of_range(sparsity):
    with pytest.raises(ValueError, match=r"^prune: expected a number from 0"):
        Settings(prune=sparsity)


def test_the_operator_of_a_format_has_a_product():
    with pytest.raises(ValueError, match="inner: expected an operator with a matrix product, found ReLU"):
        FewBitProduct(ReLU(), PRODUCTS["fp8"])
    with pytest.raises(ValueError, match="spec: expected linear codes"):
        FakeQuantizedInput(Linear(2, 2), parse("int8_row"))
    assert FakeQuantizedInput(Linear(2, 2), INT8).range.state() == []


def test_inputs_are_fake_quantised_where_ranks_share_ranges():
    from parallel.trainer.strategies import strategy_of

    with pytest.raises(ValueError, match="fake_quant_inputs: it belongs to dp"):
        strategy_of(complete({"layout": "local", "fake_quant_inputs": "int8"}))


def test_operators_in_dicts_and_nested_lists_are_transformed():
    class Branches(Operator):
        def __init__(self):
            self.branches = {"left": Linear(4, 4), "rest": [(Linear(4, 4),)]}

    model = Sequential([Branches()])
    name_all(model)
    made = transformed(model, Settings(fake_quant="int4"), 1).items[0].branches
    assert type(made["left"]) is type(made["rest"][0][0]) is TransformedWeight
    assert type(model.items[0].branches["left"]) is Linear
