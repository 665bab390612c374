"""Weights that a user changes between steps: the training goes on from them in every precision, or an error."""

import numpy as np
import pytest
from conformance.thread_communicator import run_threads
from mpi4py import MPI

from parallel import SGD, AdamW, Engine, nn
from parallel.nn.loss import MSE
from parallel.nn.operator import ParameterNotGathered

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
REPLICATED = {
    "dp": {"layout": "dp"},
    "zero1": {"layout": "zero1"},
    "zero2": {"layout": "zero2"},
    "pp:1f1b": {"layout": "pp:1f1b"},
    "pp:pipedream": {"layout": "pp:pipedream"},
}
CASES = [
    (layout, precision)
    for layout in REPLICATED
    for precision in PRECISIONS
    if (layout, precision) != ("pp:pipedream", "fp16")  # refused: no loss scale of all stages
]
ELSEWHERE = {"zero3": {"layout": "zero3"}, "tp=2": {"mesh": "tp=2"}}


def batch(step):
    random = np.random.default_rng(step)
    return random.normal(size=(8, 5)), random.normal(size=(8, 3))


def engine(model, comm, precision, optimizer=None, **settings):
    return Engine(model, MSE(), comm, optimizer or SGD(lr=0.0), precision=precision, batch=8, **settings)


def values(parameter):
    """Numbers that all precisions have, but not all those of the parameter itself."""
    return (np.arange(parameter.size) % 7 / 4 - 1).reshape(parameter.shape)


@pytest.mark.parametrize("how", ["elements", "values", "an array from before"])
@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_changed_weights_are_trained_on(layout, precision, how):
    """Also by other ranks, in checkpoints and in evaluations; unchanged elements keep the digits of master weights."""

    def rank_main(comm):
        model = nn.mlp([5, 8, 3])
        with engine(model, comm, precision, **REPLICATED[layout]) as made:
            weight = model.items[0].items[1].weight
            held = {"array": weight.data} if weight.has_values else {}
            made.step(*batch(0))
            before, changed = made.state_dict(), values(weight)
            if weight.has_values:
                if how == "elements":
                    weight.data[2:] = changed[2:]
                elif how == "values":
                    weight.data = np.concatenate([weight.data[:2].astype(np.float64), changed[2:]])
                else:
                    held["array"][2:] = changed[2:]
            expected = before[weight.name].copy()
            expected[2:] = changed[2:]
            np.testing.assert_array_equal(made.state_dict()[weight.name], expected)
            score = made.evaluate(*batch(1)).loss
            made.step(*batch(1))
            made.step(*batch(2))
            after = made.state_dict()
            np.testing.assert_array_equal(after[weight.name], expected)
            for name in before.keys() - {weight.name}:
                np.testing.assert_array_equal(after[name], before[name])
            return score, after

    for score, state in run_threads(2, rank_main):
        alone = nn.mlp([5, 8, 3])
        with engine(alone, MPI.COMM_SELF, "fp64") as made:
            made.load_state_dict(state)
            assert made.evaluate(*batch(1)).loss == pytest.approx(score, rel=1e-2 if precision != "fp64" else 1e-12)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ELSEWHERE)
def test_weights_that_are_not_whole_on_a_rank(layout, precision):
    """Refused; values that the model had before do not stand in for them."""

    def rank_main(comm):
        model = nn.mlp([5, 8, 3])
        weight = model.items[0].items[1].weight
        weight.data = np.zeros(weight.shape, np.float32)
        with engine(model, comm, precision, **ELSEWHERE[layout]) as made:
            for _ in range(2):
                with pytest.raises(ParameterNotGathered, match=r"0.1.weight .* `Engine.load_state_dict"):
                    weight.data[0] = 1
                with pytest.raises(ParameterNotGathered, match=r"0.1.weight .* `Engine.load_state_dict"):
                    weight.data = values(weight)
                made.step(*batch(0))
            made.load_state_dict({weight.name: values(weight)}, strict=False)
            np.testing.assert_array_equal(made.state_dict()[weight.name], values(weight))
        assert not weight.has_values
        weight.data = values(weight)  # free again
        np.testing.assert_array_equal(weight.data, values(weight))

    run_threads(2, rank_main)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_averages_and_checkpoints_take_changes(precision, tmp_path):
    pytest.importorskip("safetensors")
    model = nn.mlp([5, 8, 3])
    with engine(model, MPI.COMM_SELF, precision, AdamW(lr=0.01, ema=0.5)) as made:
        weight = model.items[0].items[1].weight
        made.step(*batch(0))
        weight.data[...] = values(weight)
        made.evaluate(*batch(1), ema=True)
        np.testing.assert_array_equal(made.state_dict()[weight.name], values(weight))
        weight.data[0] = 3
        made.save(tmp_path)
        weight.data[0] = 4
        made.load(tmp_path)
        assert (made.state_dict()[weight.name][0] == 3).all() and (weight.data[0] == 3).all()


def test_a_value_of_another_shape():
    model = nn.mlp([5, 8, 3])
    with engine(model, MPI.COMM_SELF, "fp32"):
        weight = model.items[0].items[1].weight
        with pytest.raises(ValueError, match=r"expected an array of shape \(5, 8\), found \(8, 5\)"):
            weight.data = values(weight).T
        with pytest.raises(ValueError, match="expected an array, as an engine has its values; found None"):
            weight.data = None
