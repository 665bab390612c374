"""Hyperparameters by PyTorch's names, parameter groups, frozen parameters and moving averages of the weights."""

import math

import numpy as np
import pytest

from parallel.nn.flat_params import BLOCK, ParamSpan, Span
from parallel.nn.operator import Parameter, constant
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.optim.optimizers import LAMB, SGD, Adam, AdamW
from parallel.optim.param_groups import MissedUpdates, ParamGroup, RateClock, checked_missed, frozen_of

NAMES = ("0.weight", "0.bias", "1.weight")
OPTIMIZERS = [(SGD, {}), (SGD, {"momentum": 0.9}), (Adam, {}), (AdamW, {}), (LAMB, {})]


def span(optimizer, **frozen):
    """Three tensors of 300 elements with the gradient 1, 2, ... in a span; the second one has no decay."""
    places = []
    for number, name in enumerate(NAMES):
        parameter = Parameter((300,), constant(1.0), decay=name != "0.bias")
        parameter.name, parameter.requires_grad = name, name not in frozen.get("frozen", ())
        places.append(ParamSpan(parameter, Span(2 * BLOCK * number, 2 * BLOCK * (number + 1))))
    whole = Span(0, places[-1].span.stop)
    gradient = np.arange(1.0, 1 + whole.size)
    return OptimizerSpan(whole, np.ones(whole.size), gradient, optimizer.fresh(np.ones(whole.size)), places)


def tensors(piece, vector=None):
    vector = piece.weights if vector is None else vector
    return [vector[place.unpadded.start : place.unpadded.stop] for place in piece.places]


def after(optimizer, steps=3, **frozen):
    """The span after some updates, of all ranks if there is one."""
    piece = span(optimizer, **frozen)
    for step in range(steps):
        optimizer.update([piece], step, 0.5, lambda sums: sums)
    return piece


def test_names_of_pytorch():
    assert AdamW(lr=0.5, betas=(0.8, 0.9), weight_decay=0.1).describe() == (
        AdamW(rate=0.5, beta1=0.8, beta2=0.9, decay=0.1).describe()
    )
    optimizer = SGD(lr=0.5)
    optimizer.lr = 0.25
    assert optimizer.rate == optimizer.lr == 0.25


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"lr": 1.0, "rate": 1.0}, "lr: expected lr or rate, found both"),
        ({"lr": 1.0, "betas": 0.9}, "betas: expected betas or beta1 and beta2, found 0.9"),
        ({"lr": 1.0, "betas": (0.9, 0.9, 0.9)}, "betas: expected"),
        ({"lr": 1.0, "groups": [{"params": [3]}]}, "params: expected parameters or patterns of names, found 3"),
    ],
)
def test_values_given_twice_or_wrongly(values, text):
    with pytest.raises(TypeError, match=text):
        AdamW(**values)


@pytest.mark.parametrize("values", [{"ema": 1.0}, {"ema": math.nan}, {"groups": [{"params": "*", "decay": -1.0}]}])
def test_values_out_of_range(values):
    with pytest.raises(ValueError, match="expected"):
        SGD(rate=1.0, **values)


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_a_group_is_like_an_optimizer_of_its_own(kind, options):
    """Each tensor moves as if all had its values."""
    groups = [{"params": "*.bias", "lr": 0.25, "weight_decay": 0.125}, ParamGroup(params=["1.*"], lr=lambda step: step)]
    mixed = after(kind(lr=0.5, weight_decay=0.5, groups=groups, **options))
    own = after(kind(lr=0.5, weight_decay=0.5, **options))
    biases = after(kind(lr=0.25, weight_decay=0.125, groups=[{"params": "*.bias", "weight_decay": 0.125}], **options))
    last = after(kind(lr=lambda step: step, weight_decay=0.5, **options))
    for found, expected in zip(tensors(mixed), (tensors(own)[0], tensors(biases)[1], tensors(last)[2])):
        np.testing.assert_array_equal(found, expected)


def test_the_first_group_counts_and_parameters_are_known_by_identity():
    optimizer = SGD(lr=1.0)
    piece = span(optimizer)
    first = piece.places[0].parameter
    optimizer = SGD(lr=1.0, groups=[{"params": [first], "lr": 0.0}, {"params": "0.*", "lr": 2.0}])
    optimizer.update([piece], 0, 1.0)
    moved = [
        float(1 - tensor[0]) / float(gradient[0])
        for tensor, gradient in zip(tensors(piece), tensors(piece, piece.gradient))
    ]
    assert moved == [0.0, 2.0, 1.0]


def test_a_group_without_parameters_is_refused():
    parameters = [place.parameter for place in span(SGD(lr=1.0)).places]
    SGD(lr=1.0, groups=[{"params": "1.*"}]).check(parameters)
    with pytest.raises(
        ValueError, match=r"groups: \['2\.\*'\] is no parameter of the model, which has 0.weight, 0.bias"
    ):
        SGD(lr=1.0, groups=[{"params": "2.*"}]).check(parameters)


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_frozen_parameters_stay_and_the_others_move_as_before(kind, options):
    found = after(kind(lr=0.5, weight_decay=0.5, ema=0.5, **options), frozen=NAMES[1:2])
    free = after(kind(lr=0.5, weight_decay=0.5, **options))
    np.testing.assert_array_equal(tensors(found)[0], tensors(free)[0])
    np.testing.assert_array_equal(tensors(found)[2], tensors(free)[2])
    np.testing.assert_array_equal(tensors(found)[1], 1.0)
    for name, vector in found.state.items():
        np.testing.assert_array_equal(tensors(found, vector)[1], 1.0 if name == "ema" else 0.0)


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_moving_average_of_the_weights(kind, options):
    optimizer = kind(lr=0.5, ema=0.75, **options)
    assert optimizer.states()[-1] == "ema"
    piece, expected = span(optimizer), None
    for step in range(4):
        optimizer.update([piece], step, 0.5, lambda sums: sums)
        expected = piece.weights.copy() if expected is None else 0.75 * expected + 0.25 * piece.weights
        np.testing.assert_array_equal(piece.state["ema"], expected)


def test_updates_may_share_the_rate_of_a_step():
    """Of two updates at step 6 each takes half of the rates, of the groups too."""
    optimizer = SGD(lr=lambda step: step / 4, groups=[{"params": "1.*", "lr": 3.0}])
    piece = span(optimizer)
    optimizer.update([piece], 0, 1.0, clock=RateClock(6, 2))
    np.testing.assert_array_equal(tensors(piece)[0], 1 - 0.75 * tensors(piece, piece.gradient)[0])
    np.testing.assert_array_equal(tensors(piece)[2], 1 - 1.5 * tensors(piece, piece.gradient)[2])


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_decay_is_read_in_every_update(kind, options):
    """A tensor whose flag changes before the second update moves on like one whose flag was so from the start."""
    optimizer = kind(lr=0.5, weight_decay=0.25, **options)
    changed, other = span(optimizer), span(optimizer)
    for piece in (changed, other):
        optimizer.update([piece], 0, 0.5, lambda sums: sums)
    changed.places[1].parameter.decay = True
    other.weights[:], other.places[1].parameter.decay = changed.weights, True
    fresh = OptimizerSpan(other.span, other.weights, other.gradient, other.state, other.places)
    for piece in (changed, fresh):
        optimizer.update([piece], 1, 0.5, lambda sums: sums)
    np.testing.assert_array_equal(changed.weights, fresh.weights)
    undecayed = after(kind(lr=0.5, weight_decay=0.25, **options), steps=2)
    assert not np.array_equal(tensors(changed)[1], tensors(undecayed)[1])


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_bias_corrections_count_the_updates_of_a_parameter(kind, options):
    """A tensor that was frozen for 300 updates then moves, to the bit, as from the start; the others as ever."""
    optimizer, missed = kind(lr=0.5, weight_decay=0.25, **options), MissedUpdates()
    piece = span(optimizer, frozen=NAMES[:1])
    piece.missed = missed
    free = after(kind(lr=0.5, weight_decay=0.25, **options), steps=305)
    for step in range(305):
        piece.places[0].parameter.requires_grad = step >= 300
        optimizer.update([piece], step, 0.5, lambda sums: sums)
        missed.count(frozen_of(place.parameter for place in piece.places), 1)
    assert missed.state() == {"0.weight": 300}
    np.testing.assert_array_equal(tensors(piece)[0], tensors(after(optimizer, steps=5))[0])
    for number in (1, 2):
        np.testing.assert_array_equal(tensors(piece)[number], tensors(free)[number])


@pytest.mark.parametrize("state", [3, {"a": 1}, {"0.weight": -1}, {"0.weight": 8}, {"0.weight": 1.0}])
def test_invalid_numbers_of_missed_updates(state):
    parameters = [place.parameter for place in span(SGD(lr=1.0)).places]
    assert checked_missed({"0.weight": 7}, parameters, 7) == {"0.weight": 7}
    with pytest.raises(ValueError, match="missed: expected"):
        checked_missed(state, parameters, 7)
