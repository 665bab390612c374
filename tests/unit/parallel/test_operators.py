"""What every operator keeps to, and what each of them alone does."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from support.operator_cases import CASES, inputs, play

from parallel.engine.gradient_hooks import HookedGradients
from parallel.nn import gradcheck, kernels
from parallel.nn.activation import GELU, ReLU, SiLU
from parallel.nn.attention import CausalAttention, self_attention
from parallel.nn.compose import Recompute, Sequential
from parallel.nn.conv import MaxPool2d
from parallel.nn.dropout import Dropout
from parallel.nn.embedding import Embedding
from parallel.nn.flat_params import FlatParams
from parallel.nn.kernels import causal_attention
from parallel.nn.kernels.storage import BFLOAT16
from parallel.nn.linear import Linear
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.operator import ArraySpec, Parameter, ParameterNotGathered, PassMode, constant, name_all, nbytes_of

SHAPES = [(name, shape) for name, case in CASES.items() for shape in case.shapes]
WRONG = [(name, shape) for name, case in CASES.items() for shape in case.wrong]
QUERIES = causal_attention.block_length()
HALVES = {"bfloat16": (ml_dtypes.bfloat16, 2**-8), "float16": (np.float16, 2**-11)}


def same(left, right):
    """Bit for bit, also None."""
    return left is right or np.array_equal(left, right)


@pytest.mark.parametrize("name, shape", SHAPES)
def test_gradients(name, shape):
    """Against differences, and whatever else `gradcheck` looks at: saved bytes foretold, nothing written into."""
    case = CASES[name]
    gradcheck.check(case.make(), inputs(case, shape))


@pytest.mark.parametrize("name, shape", WRONG)
def test_wrong_shapes(name, shape):
    case = CASES[name]
    operator = case.make()
    with pytest.raises(ValueError, match="expected"):
        operator.outline(ArraySpec(shape, np.dtype(np.int64 if case.tokens else np.float64)))
    with pytest.raises(ValueError, match="expected"):
        play(operator, inputs(case, shape), run=PassMode(samples=np.zeros(2, np.int64)))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", CASES)
def test_half_types(name, half):
    """Storage is half, gradients are float32, and both are near what float32 gives for the same rounded numbers."""
    case, (dtype, eps) = CASES[name], HALVES[half]
    operator, x = case.make(), inputs(case)
    rounded = x if case.tokens else x.astype(dtype).astype(np.float32)
    found = play(operator, rounded, dtype)
    assert found.y.dtype == dtype and found.y.flags.c_contiguous
    assert found.dx is None or found.dx.dtype == dtype
    assert {gradient.dtype for gradient in found.gradients.values()} <= {np.dtype(np.float32)}
    outline = operator.outline(ArraySpec(x.shape, x.dtype if case.tokens else np.dtype(dtype)))
    assert outline.y == (found.y.shape, found.y.dtype) and nbytes_of(outline.saved) == nbytes_of(found.saved)

    expected = play(operator, rounded, np.float32, through=dtype)
    for one, other in [(found.y, expected.y), *((found.gradients[k], expected.gradients[k]) for k in found.gradients)]:
        bound = 64 * eps * max(np.abs(other).max(initial=0), 1)
        np.testing.assert_allclose(np.asarray(one, np.float32), other, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_recomputed_is_the_same(name, dtype):
    """Bit for bit, with only the input kept."""
    case = CASES[name]
    x = inputs(case)
    plain, again = play(case.make(), x, dtype), play(Recompute(case.make()), x, dtype)
    assert same(plain.y, again.y) and same(plain.dx, again.dx)
    assert plain.gradients.keys() == again.gradients.keys()
    for name in plain.gradients:
        assert same(plain.gradients[name], again.gradients[name]), name


@pytest.mark.parametrize("name", CASES)
def test_many_micro_batches_under_way(name):
    """What is saved is a value: forward of another batch between forward and backward changes nothing."""
    case = CASES[name]
    operator, x = case.make(), inputs(case)
    expected = play(operator, x)
    run = PassMode(samples=np.arange(len(x), dtype=np.int64))
    y, saved = operator.forward(x, run)
    operator.forward(inputs(case, seed=5), run)
    dy = np.random.default_rng(3).standard_normal(y.shape)
    dx = operator.backward(dy, saved, lambda parameter, compute: compute(np.empty(parameter.shape)))
    assert same(expected.y, y) and (dx is None or np.isfinite(dx).all())


@pytest.mark.parametrize("name", CASES)
def test_gradients_may_be_computed_later(name):
    """The sink may call what it is given after backward has returned."""
    case = CASES[name]
    operator, x = case.make(), inputs(case)
    expected, queue, found = play(operator, x), [], {}
    run = PassMode(samples=np.arange(len(x), dtype=np.int64))
    random = np.random.default_rng(2)
    random.standard_normal(FlatParams(operator).length)  # as play draws
    y, saved = operator.forward(x, run)
    operator.backward(random.standard_normal(y.shape), saved, lambda *use: queue.append(use))
    for parameter, compute in queue:
        out = np.empty(parameter.shape)
        compute(out)
        found[parameter.name] = found.get(parameter.name, 0) + out
    assert all(same(expected.gradients[name], found[name]) for name in expected.gradients)


# ------------------------------------------------------------------------------------------ one by one


def test_hooks_are_removed():
    """Each handle ends the calls of its own registration, once; a hook may end its own."""
    parameter, calls = Parameter((2,), constant(0.0)), []
    handles = {}

    def once(gradient):
        calls.append("once")
        handles["once"].remove()

    handles["once"] = parameter.register_hook(once)
    first, second = (parameter.register_hook(lambda gradient: calls.append("each")) for _ in range(2))
    third = parameter.register_hook(calls.append)
    third.remove()
    take = HookedGradients(lambda parameter, compute: compute(np.zeros(2)))
    for _ in range(2):
        take(parameter, lambda out: None)
    assert calls == ["once", "each", "each", "each", "each"]
    first.remove()
    first.remove()
    take(parameter, lambda out: None)
    assert len(parameter.hooks) == 1 and len(calls) == 6
    second.remove()
    assert parameter.hooks == []
    with pytest.raises(TypeError, match="hook: expected a function of a gradient, found int"):
        parameter.register_hook(3)


def test_weights_that_are_not_at_hand():
    with pytest.raises(ParameterNotGathered):
        Linear(2, 2).forward(np.ones((1, 2)), PassMode())


@pytest.mark.parametrize("token, message", [(7, "token 7 is not below 7"), (-1, "token -1 is below 0")])
def test_tokens_out_of_range(token, message):
    operator = Embedding(7, 4)
    operator.weight.data = np.zeros((7, 4))
    with pytest.raises(ValueError, match=message):
        operator.forward(np.array([[0, token]]), PassMode())


def test_tokens_that_are_no_integers():
    with pytest.raises(ValueError, match="an array of integers"):
        Embedding(7, 4).forward(np.zeros((2, 2)), PassMode())


def test_attention_sees_no_future():
    """What comes after a position does not change its result, across the edges of blocks."""
    operator, x = CausalAttention(2), np.random.default_rng(0).standard_normal((1, 2 * QUERIES + 3, 12))
    y = operator.forward(x, PassMode())[0]
    for length in (1, QUERIES, QUERIES + 1, 2 * QUERIES + 2):
        changed = x.copy()
        changed[:, length:] = 100
        np.testing.assert_array_equal(operator.forward(changed, PassMode())[0][:, :length], y[:, :length])


def test_attention_keeps_half_of_the_square():
    length = 8 * QUERIES
    outline = CausalAttention(2).outline(ArraySpec((1, length, 12), np.dtype(np.float32)))
    assert sum(p.nbytes for p in outline.saved[1]) == 4 * 2 * length * (length + QUERIES) / 2


def test_heads_that_do_not_divide_the_width():
    with pytest.raises(ValueError, match="multiple of the heads"):
        self_attention(10, 3)


def test_max_pool_of_nan_is_nan():
    y = MaxPool2d(2).forward(np.array([[[[1.0, np.nan], [2.0, 0.0]]]]), PassMode())[0]
    assert np.isnan(y).all()


# ------------------------------------------------------------------------------------------ dropout


def mask(samples, name="a", seed=0, step=0, elements=1000, rate=0.25):
    operator = Dropout(rate)
    operator.name = name
    run = PassMode(seed=seed, step=step, samples=np.asarray(samples, np.int64))
    return operator.forward(np.ones((len(samples), elements)), run)[0] != 0


def test_a_mask_belongs_to_its_sample():
    """In whichever batch and place a sample comes, the same elements are dropped."""
    whole = mask([5, 6, 7, 2**33])
    for number, sample in enumerate([5, 6, 7, 2**33]):
        np.testing.assert_array_equal(mask([99, sample])[1], whole[number])


def test_masks_differ():
    """From sample to sample, step to step, operator to operator, seed to seed: about as often as chance has it."""
    masks = [mask([1])[0], mask([2])[0], mask([1], step=1)[0], mask([1], name="b")[0], mask([1], seed=1)[0]]
    masks += [mask([1 + 2**32])[0]]
    for i, one in enumerate(masks):
        assert abs(one.mean() - 0.75) < 0.06
        for other in masks[:i]:
            assert abs((one == other).mean() - (0.75**2 + 0.25**2)) < 0.07


def test_mask_of_fewer_elements_is_a_beginning():
    np.testing.assert_array_equal(mask([3], elements=7)[0], mask([3], elements=1000)[0, :7])


def test_dropout_keeps_the_mean():
    x = np.ones((50, 1000), np.float32)
    y, _ = Dropout(0.25).forward(x, PassMode(samples=np.arange(50)))
    assert y.dtype == np.float32 and abs(y.mean() - 1) < 0.01 and set(np.unique(y)) == {0, np.float32(1 / 0.75)}


def test_no_dropout_outside_training():
    x = np.ones((3, 4))
    y, saved = Dropout(0.5).forward(x, PassMode(training=False))
    assert y is x and saved is None and Dropout(0.5).backward(x, saved, lambda *_: None) is x


def test_dropout_wants_numbers_of_samples():
    with pytest.raises(ValueError, match="a batch of 2"):
        Dropout(0.5).forward(np.ones((3, 4)), PassMode(samples=np.arange(2)))


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_wrong_rates(rate):
    with pytest.raises(ValueError, match="rate"):
        Dropout(rate)


ACTIVATIONS = {"relu": ReLU, "gelu": GELU, "gelu_tanh": partial(GELU, tanh=True), "silu": SiLU}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_bias_and_an_activation_are_one_pass(monkeypatch, name, dtype):
    """With the bits that both have one after another, in what is saved too; and the pass is really one."""
    passes, kernel = [], getattr(kernels, f"biased_{name}")
    monkeypatch.setattr(kernels, f"biased_{name}", lambda *arrays: passes.append(1) or kernel(*arrays))
    model = Sequential([Linear(37, 19), ACTIVATIONS[name](), Linear(19, 5)])
    x = np.random.default_rng(0).standard_normal((3, 11, 37))
    apart = play(One(model.items), x, dtype)
    assert not passes
    fused = play(model, x, dtype)
    assert passes == [1]
    assert len(apart.saved) == len(fused.saved) == 3
    for one, other in ((apart.y, fused.y), (apart.dx, fused.dx), *zip(apart.saved, fused.saved)):
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    assert {key: value.tobytes() for key, value in apart.gradients.items()} == {
        key: value.tobytes() for key, value in fused.gradients.items()
    }


class One(Sequential):
    """Items that know nothing of each other."""

    def forward(self, x, run):
        saved = []
        for item in self.items:
            x, kept = item.forward(x, run)
            saved.append(kept)
        return x, tuple(saved)


class Doubled(Linear):
    """A linear map of another kind."""

    def forward(self, x, run):
        return super().forward(2 * x, run)


@pytest.mark.parametrize("first, factor", [(Linear(2, 2, bias=False), 1), (Doubled(2, 2), 2)])
def test_what_is_no_plain_bias_is_left_alone(first, factor):
    """A linear map without one, or of a kind that goes forward in a way of its own."""
    first.weight.data = np.eye(2)
    if first.bias:
        first.bias.data = np.zeros(2)
    y, saved = Sequential([first, ReLU()]).forward(np.array([[1.0, -1]]), PassMode())
    assert y.tolist() == [[factor, 0]] and len(saved) == 2


def test_a_shared_operator_has_its_first_path_and_its_parameters_are_counted():
    shared = Linear(3, 3)
    model = Sequential([shared, Linear(3, 3), shared])
    names = [parameter.name for parameter in name_all(model)]
    assert [operator.name for operator in model.items[:2]] == ["0", "1"]
    assert [name.rpartition(".")[0] for name in names] == ["0", "0", "1", "1"]
    assert [parameter.uses for parameter in model.parameters()] == [2, 2, 1, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, BFLOAT16])
def test_label_smoothing_is_the_mean_over_a_distribution(dtype):
    """Of -log softmax: 0.9 at the target and 0.1 spread over all seven classes; ignored targets have no part."""
    random = np.random.default_rng(0)
    scores, targets = random.normal(size=(3, 4, 7)).astype(dtype), random.integers(-2, 7, (3, 4))
    loss = SoftmaxCrossEntropy(0.1)
    total, saved = loss.forward(scores, targets)
    wide = scores.astype(np.float64)
    probabilities = np.exp(wide) / np.exp(wide).sum(axis=-1, keepdims=True)
    wanted = (0.1 / 7 + 0.9 * np.eye(7)[targets]) * (targets >= 0)[..., None]
    exact = dtype == np.float64
    assert total == pytest.approx(-(wanted * np.log(probabilities)).sum(), rel=1e-13 if exact else 1e-5)
    gradient = 0.25 * (probabilities * (targets >= 0)[..., None] - wanted)
    tolerance = {np.float64: 1e-15, np.float32: 1e-6}.get(dtype, 2e-3)
    found = loss.backward(0.25, saved)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(np.float64), gradient, atol=tolerance)
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match="smoothing: expected 0 to below 1, found"):
            SoftmaxCrossEntropy(wrong)
