"""Levels of k-means weights that are trained after quantisation, and widths of the inputs of each layer."""

import numpy as np
import pytest

pytest.importorskip("safetensors")

from mpi4py import MPI

from collectives import Communicator
from parallel.data.datasets import ArrayDataset, LearningTask
from parallel.nn.gradcheck import check
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.nn.operator import name_all
from parallel.nn.transforms.quantizable_layers import layers_of
from parallel.ptq.calibration import dealt
from parallel.ptq.evaluation import evaluate
from parallel.ptq.mixed_inputs import input_mixture
from parallel.ptq.packed_weights import RoundedInput, weights_of
from parallel.ptq.quantize_model import quantise
from parallel.ptq.tuning import FineTuning, tune_levels, tune_weights, with_levels
from quant import parse, quantize

SHAPES = {"mlp:tiny": (8, 8), "convnet:tiny": (1, 8, 8), "gpt:tiny": (16,)}


def problem(name, samples=64):
    random, shape = np.random.default_rng(0), SHAPES[name]
    text = name.startswith("gpt")
    x = random.integers(0, 40, (samples, *shape)) if text else random.random((samples, *shape)).astype(np.float32)
    y = (x + 1) % 40 if text else random.integers(0, 10, samples)
    data = ArrayDataset(x, y)
    return LearningTask(name, data, data, "bytes" if text else "classes", shape, 40 if text else 10)


def untrained(name):
    model = build(name, SHAPES[name], 40 if name.startswith("gpt") else 10)
    for parameter in name_all(model):
        parameter.data = parameter.first(1).astype(np.float32)
    return model


@pytest.mark.parametrize("spec", ["kmeans2", "kmeans3_g24", "kmeans2_row"])
@pytest.mark.parametrize("shape", [(7, 24), (3, 50), (1, 1)])
def test_the_index_finds_the_level_of_every_element(spec, shape):
    codes = quantize(np.random.default_rng(1).normal(size=shape).astype(np.float32), parse(spec))
    index = codes.level_index()
    assert index.shape == shape
    np.testing.assert_array_equal(codes.levels().reshape(-1)[index], codes.dequantize())
    other = codes.with_levels(2 * codes.levels())
    np.testing.assert_array_equal(other.dequantize(), 2 * codes.dequantize())
    np.testing.assert_array_equal(other.integers(), codes.integers())
    with pytest.raises(ValueError, match="expected codes of kmeans"):
        quantize(np.ones(shape, np.float32), parse("int8")).level_index()


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_levels(name):
    """A tied table gives its levels the sum of both uses."""
    trainable = with_levels(quantise(untrained(name), parse("kmeans2"), [], MPI.COMM_SELF))
    x = problem(name).train.x[:2]
    for parameter in name_all(trainable):
        parameter.data = parameter.first(0)
    assert check(trainable, x if x.dtype.kind == "i" else x.astype(np.float64)) < 1e-4


@pytest.mark.parametrize("name", SHAPES)
def test_tuned_levels_lose_less(name):
    """Codes and other parameters stay; the given models too."""
    model, task, loss = untrained(name), problem(name), SoftmaxCrossEntropy()
    before = {one.name: one.data.copy() for one in model.parameters()}
    with Communicator(MPI.COMM_SELF) as comm:
        batches = dealt(task.train, 64, 16, 0, 1)
        rounded = quantise(model, parse("kmeans2"), batches, comm)
        tuned = tune_levels(model, rounded, task, comm, FineTuning(epochs=20, batch=16))
        losses = [evaluate(one, loss, batches, comm).loss for one in (rounded, tuned)]
        assert losses[1] < losses[0] - 0.01
        codes, other = weights_of(rounded), weights_of(tuned)
        assert codes.keys() == other.keys() == {layer.name for layer in layers_of(model)}
        for one in codes:
            np.testing.assert_array_equal(codes[one].quantized.codes.integers(), other[one].quantized.codes.integers())
            assert codes[one].quantized.nbytes == other[one].quantized.nbytes
        assert all((one.data == before[one.name]).all() for one in model.parameters())
        with pytest.raises(ValueError, match=r"spec: levels are trained of kmeans; .* has codes"):
            tune_levels(model, quantise(model, parse("int4"), [], comm), task, comm, FineTuning(1, 16))


@pytest.mark.parametrize("name", SHAPES)
def test_tuned_weights_lose_less(name):
    """Codes are those of the specs by layer; weights that were 0 stay 0; the given model is not changed."""
    model, task, loss = untrained(name), problem(name), SoftmaxCrossEntropy()
    layers = layers_of(model)
    layers[-1].parameter.data[0, 1:] = 0
    specs = [parse("int2")] * (len(layers) - 1) + [parse("int3")]
    before = {one.name: one.data.copy() for one in model.parameters()}
    with Communicator(MPI.COMM_SELF) as comm:
        batches = dealt(task.train, 64, 16, 0, 1)
        tuned = tune_weights(model, specs, task, comm, FineTuning(epochs=20, batch=16))
        losses = [evaluate(one, loss, batches, comm).loss for one in (model, tuned)]
    assert losses[1] < losses[0] - 0.01  # of untrained weights
    weights = weights_of(tuned)
    assert [weights[layer.name].quantized.codes.spec for layer in layers] == specs
    assert not weights[layers[-1].name].data[0, 1:].any() and weights[layers[-1].name].data.any()
    assert all((one.data == before[one.name]).all() for one in model.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_widths_of_inputs(name):
    model, task, loss, widths = untrained(name), problem(name), SoftmaxCrossEntropy(), [2, 4, 8]
    with Communicator(MPI.COMM_SELF) as comm:
        batches = dealt(task.train, 64, 16, 0, 1)
        packed = quantise(model, parse("int8"), batches, comm)
        mixed = input_mixture(packed, loss, parse("int8"), widths, "minmax", batches, comm)
        assert (mixed.table.costs[:, 2] == 4 * mixed.table.costs[:, 0]).all()
        if name == "mlp:tiny":
            assert (mixed.table.costs[0] * 8 == 64 * np.array(widths)).all()  # a sample's 64 numbers
        for bits in (2, 5, 8):
            choice = mixed.choose("dp", bits, comm)
            assert mixed.table.cost(choice) <= mixed.budget(bits) * (1 + 1e-9)
            made = mixed.chosen(choice)
            inputs = {one.name: one.spec.bits for _, one in made.walk() if isinstance(one, RoundedInput)}
            assert inputs == {one: widths[at] for one, at in zip(mixed.names, choice)}
            assert np.isfinite(evaluate(made, loss, batches, comm).loss)
        assert mixed.choose("dp", 2, comm) == (0,) * len(mixed.names)
        with pytest.raises(ValueError, match="mixed-inputs: expected 2 to 8 bits, found 9"):
            mixed.budget(9)
