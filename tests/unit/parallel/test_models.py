"""Models: sizes, first values, names, and that they learn."""

import numpy as np
import pytest

from parallel.nn.compose import Recompute, Sequential
from parallel.nn.flat_params import FlatParams
from parallel.nn.linear import Linear
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import MODELS, TRANSFORMERS, build, convnet, mlp, transformer
from parallel.nn.operator import ArraySpec, Operator, ParameterNotGathered, PassMode, nbytes_of

SAMPLES = {"mlp": (1, 8, 8), "convnet": (1, 8, 8), "gpt": (16,), "gpt-moe": (16,)}
EVERY = [f"{family}:{size}" for family in MODELS for size in MODELS[family].sizes]


def elements(model):
    return sum(parameter.size for parameter in model.parameters())


@pytest.mark.parametrize("name", EVERY)
def test_every_size_has_an_outline(name):
    """From shapes alone, so large models cost nothing here; scores of the classes come out."""
    shape = SAMPLES[name.partition(":")[0]]
    model = build(name, shape, 10)
    tokens = name.startswith("gpt")
    outline = model.outline(ArraySpec((3, *shape), np.dtype(np.int64 if tokens else np.float32)))
    assert outline.y == ((3, 16, 10) if tokens else (3, 10), np.float32)
    assert outline.flops > 0


@pytest.mark.parametrize("name", ["mlp:tiny", "convnet:tiny", "gpt:tiny"])
def test_it_learns(name):
    """A batch by heart in a few dozen steps of plain descent, from a loss near log(classes).

    At this rate the loss of the transformer falls alike whatever the roundings. At 0.1, 0.2 and 0.3 it jumps at times.
    """
    shape = SAMPLES[name.partition(":")[0]]
    random, model, loss = np.random.default_rng(0), build(name, shape, 10), SoftmaxCrossEntropy()
    tokens = name.startswith("gpt")
    x = random.integers(0, 10, (4, *shape)) if tokens else random.standard_normal((4, *shape)).astype(np.float32)
    targets = random.integers(0, 10, x.shape if tokens else 4)
    flat = FlatParams(model)
    vector, gradient = np.zeros(flat.length, np.float32), np.zeros(flat.length, np.float32)
    flat.initialise(vector, 0)
    flat.bind(vector)

    def sink(parameter, compute):
        out = np.empty(parameter.shape, np.float32)
        compute(out)
        flat.view(gradient, parameter, flat.by_name[parameter.name].span.start)[...] += out

    losses = []
    for _ in range(60):
        y, saved = model.forward(x, PassMode(samples=np.arange(4)))
        sum_, kept = loss.forward(y, targets)
        losses.append(sum_ / targets.size)
        gradient[...] = 0
        model.backward(loss.backward(1 / targets.size, kept), saved, sink)
        vector -= 0.15 * gradient
    assert abs(losses[0] - np.log(10)) < 1.5 and losses[-1] < 0.5 * losses[0]


def test_parameters_of_gpt_2():
    """124 million with GPT-2's vocabulary and context, as published."""
    assert elements(transformer(50257, 1024, *TRANSFORMERS["large"])) == 124_439_808


def test_recompute_keeps_names_and_forgets_activations():
    plain, again = (build("gpt:tiny", (16,), 10, recompute=recompute) for recompute in (False, True))
    assert [place.parameter.name for place in FlatParams(plain).places] == [
        place.parameter.name for place in FlatParams(again).places
    ]
    spec = ArraySpec((2, 16), np.dtype(np.int64))
    assert nbytes_of(again.outline(spec).saved) < nbytes_of(plain.outline(spec).saved) / 4
    assert [isinstance(unit, Recompute) for unit in again.items] == [False, True, True, False]


def test_the_embedding_is_tied():
    model = transformer(7, 4, 1, 1, 8)
    FlatParams(model)
    assert [p.name for p in model.parameters() if p.uses == 2] == ["0.0.weight"]


def test_first_values_do_not_depend_on_the_rest():
    """A parameter of the same name begins the same in a deeper model."""
    shallow, deep = mlp([4, 5, 3]), mlp([4, 5, 5, 3])
    for model in (shallow, deep):
        FlatParams(model)
    first = [model.parameters()[0].first(3) for model in (shallow, deep)]
    assert np.array_equal(*first) and abs(first[0]).max() > 0


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("resnet", (1, 8, 8), "expected one of mlp, convnet, gpt, gpt-moe, found 'resnet'"),
        ("gpt:gigantic", (16,), "expected a size of tiny, mini, small, medium, large, found 'gigantic'"),
        ("gpt:", (16,), "expected a size of tiny, mini, small, medium, large, found ''"),
        ("gpt", (1, 8, 8), r"gpt: expected samples of shape \(length,\)"),
        ("convnet", (64,), r"convnet: expected samples of shape \(channels, height, width\)"),
        ("convnet:medium", (1, 4, 4), "4 x 4 cannot be halved 3 times"),
    ],
)
def test_what_there_is_no_model_for(name, shape, message):
    with pytest.raises(ValueError, match=message):
        build(name, shape, 10)


def test_too_few_widths():
    with pytest.raises(ValueError, match="at least two widths"):
        mlp([3])


def test_odd_images():
    """Heights and widths that do not halve evenly lose their last row or column, in the linear map's size as well."""
    outline = convnet((3, 9, 5), 4).outline(ArraySpec((2, 3, 9, 5), np.dtype(np.float32)))
    assert outline.y.shape == (2, 4)


class Holder(Operator):
    """Operator that keeps `parts` in an attribute."""

    def __init__(self, parts):
        self.parts = parts


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        (lambda unit: {"a": unit}, ["0.parts.a.weight", "0.parts.a.bias"]),
        (lambda unit: [[unit]], ["0.parts.0.0.weight", "0.parts.0.0.bias"]),
        (lambda unit: {"w": unit.weight, "b": (unit.bias,), "n": 3}, ["0.parts.w", "0.parts.b.0"]),
        (lambda unit: {2: {"both": [unit.weight, unit.weight]}}, ["0.parts.2.both.0"]),
        (lambda unit: {}, []),
    ],
)
def test_parameters_in_containers(parts, names):
    parameters = FlatParams(Sequential([Holder(parts(Linear(2, 3)))])).places
    assert [place.parameter.name for place in parameters] == names
    assert [place.parameter.uses for place in parameters] == [2 if "both" in name else 1 for name in names]


@pytest.mark.parametrize("parts", [lambda unit: {unit.weight}, lambda unit: [[[[unit]]]]])
def test_an_operator_where_the_tree_does_not_look_is_refused(parts):
    with pytest.raises(
        ValueError, match=r"Holder 0: parts holds a \w+ in a (list|set), and `members` does not find it"
    ):
        FlatParams(Sequential([Holder(parts(Linear(2, 3)))]))


def test_an_attribute_that_members_leaves_out_is_refused():
    model = Sequential([Linear(2, 3)])
    model.head = Linear(3, 4)
    with pytest.raises(ValueError, match=r"Sequential \(the model\): head holds a Parameter in a Linear"):
        FlatParams(model)


def test_two_parameters_of_one_name_are_refused():
    parts = {"a": {"b": Linear(2, 3).weight}, "a.b": Linear(2, 3).weight}
    with pytest.raises(ValueError, match=r"expected different names, found two that are 0.parts.a.b"):
        FlatParams(Sequential([Holder(parts)]))


def test_what_the_tree_has_anyway_may_be_in_a_set_as_well():
    holder = Holder(Linear(2, 3))
    holder.all = {holder.parts}
    assert len(FlatParams(Sequential([holder])).places) == 2


def test_a_parameter_without_values_says_where_they_come_from():
    with pytest.raises(ParameterNotGathered, match="expected it, or the operator that holds it, as an attribute"):
        _ = Linear(2, 3).weight.data
    model = Sequential([Linear(2, 3)])
    FlatParams(model)
    with pytest.raises(
        ParameterNotGathered, match=r"parameter 0.weight of shape \(2, 3\) has no values here: an engine gives it"
    ):
        _ = model.items[0].weight.data
