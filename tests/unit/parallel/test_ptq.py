"""Trained models in few bits: what is watched, what is rounded, what is lost, and what comes back out of a file."""

import re
import warnings

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("sklearn")

from mpi4py import MPI

from collectives import Communicator
from parallel.checkpoint.checkpoint_files import CheckpointError
from parallel.data.sampler import Batch
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.nn.operator import PassMode, name_all
from parallel.nn.transforms.quantizable_layers import expect_finite, kind_of, layers_of
from parallel.optim.optimizers import SGD
from parallel.ptq import load_model
from parallel.ptq import packed_weights as module
from parallel.ptq.calibration import calibrate, dealt, forward, watch
from parallel.ptq.evaluation import compare, evaluate
from parallel.ptq.mixed_precision import SENSITIVITIES, fisher, gradients, mixture, options_of
from parallel.ptq.packed_weights import RoundedInput, nbytes, packed, weights_of
from parallel.ptq.quantize_model import METHODS, method_for, quantise, rounded
from parallel.trainer.recipes import complete
from parallel.trainer.task_setup import prepare
from parallel.trainer.trainer import Training
from quant import INT8, PRESETS, PerChannel, PerGroup, QuantSpec, grouped, parse, quantize, wire_nbytes
from quant.io import safetensors_file
from quant.observers import OBSERVERS
from quant.search import SEARCHES

SELF = MPI.COMM_SELF
F = np.float32
pytestmark = pytest.mark.filterwarnings("ignore:calibration. expected at least as many rows")
"""Most tests calibrate on few samples."""

NF4 = PRESETS["NF4"].replace(granularity=PerGroup(16))
SHAPES = {"mlp:tiny": (8, 8), "convnet:tiny": (1, 8, 8), "gpt:tiny": (16,)}


def sample(name, batches=3, size=8, seed=0):
    """Inputs and targets for a model of this name."""
    random, shape = np.random.default_rng(seed), SHAPES[name]
    text = name.startswith("gpt")
    for number in range(batches):
        x = random.integers(0, 40, (size, *shape)) if text else random.random((size, *shape)).astype(F)
        y = random.integers(0, 40, (size, *shape)) if text else random.integers(0, 10, size)
        yield Batch(number, x, y, np.arange(size) + number * size)


def untrained(name, recompute=False):
    """A model with its first values, larger than usual, and biases that are not 0."""
    model = build(name, SHAPES[name], 40 if name.startswith("gpt") else 10, recompute=recompute)
    for parameter in name_all(model):
        parameter.data = (parameter.first(1) + 0.01 * np.arange(parameter.size).reshape(parameter.shape) % 0.07).astype(
            F
        )
    return model


def outputs(model, batches):
    return np.concatenate([forward(model, batch) for batch in batches])


@pytest.mark.parametrize("name", SHAPES)
def test_layers_are_products_of_matrices(name):
    """What goes into every layer, times its matrix, plus its bias, is what comes out."""
    model, seen = untrained(name), []
    layers = layers_of(model)
    matrices = {user.name: layer.matrix for layer in layers for user in layer.users}

    def see(operator, x, y):
        product = kind_of(operator).product
        if product is not None:
            bias = getattr(operator, "bias", None)
            found = product.rows(operator, x) @ matrices[operator.name].T + (0 if bias is None else bias.data)
            np.testing.assert_allclose(product.shaped(operator, x, found), y, rtol=1e-4, atol=1e-4)
            seen.append(operator.name)

    watched = watch(model, set(matrices), see)
    for batch in sample(name):
        np.testing.assert_allclose(forward(watched, batch), forward(model, batch), rtol=1e-5, atol=1e-5)
    assert len(set(seen)) == sum(layer.multiplied for layer in layers) == {"m": 2, "c": 3, "g": 9}[name[0]]


def test_a_table_that_is_tied_is_one_layer():
    model = untrained("gpt:tiny")
    first = layers_of(model)[0]
    assert [type(user).__name__ for user in first.users] == ["Embedding", "Unembedding"]
    made = packed(model, {first.name: rounded([(first, INT8)], {}, "rtn", SELF)[0]})
    assert made.items[0].items[0].weight is made.items[-1].items[-1].weight
    assert nbytes(made) == nbytes(model) - 4 * first.matrix.size + first.matrix.size + 4


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_packed_is_the_same_kind_of_model(name, recompute):
    """Its result is that of the model whose weights have the numbers that the codes stand for."""
    model, spec = untrained(name, recompute), grouped(4, 16)
    batches = list(sample(name))
    before = outputs(model, batches)
    made = quantise(model, spec, batches, SELF)
    found = outputs(made, batches)
    assert (outputs(model, batches) == before).all(), "the model itself has changed"
    assert not np.allclose(found, before, atol=1e-6)
    for layer in layers_of(model):
        back = quantize(layer.matrix, spec).dequantize()
        layer.parameter.data = np.ascontiguousarray(back.T if layer.transposed else back.reshape(layer.parameter.shape))
    np.testing.assert_allclose(found, outputs(model, batches), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_are_those_of_the_layout(name):
    model = untrained(name)
    layers, batches = layers_of(model), list(sample(name))
    plain = 4 * (sum(p.size for p in model.parameters()) - sum(layer.matrix.size for layer in layers))
    for method in METHODS:
        made = quantise(model, grouped(3, 16), batches, SELF, method=method)
        weights = weights_of(made)
        assert [weights[layer.name].quantized.nbytes for layer in layers] == [
            wire_nbytes(entry.spec(grouped(3, 16)), layer.shape) + 4 * layer.shape[1] * entry.divides
            for layer, entry in zip(layers, [method_for(layer, method) for layer in layers])
        ]
        assert nbytes(made) == plain + sum(weight.quantized.nbytes for weight in weights.values())


@pytest.mark.parametrize("spec", [INT8, parse("int8_row"), grouped(4, 16), parse("int4_g16_zero"), NF4])
@pytest.mark.parametrize("name", SHAPES)
def test_rounded_inputs(name, spec, monkeypatch):
    """By products of integers where both sides are, and else of numbers: the same but for the last digits."""
    model, batches = untrained(name), list(sample(name))
    made = quantise(model, spec, batches, SELF, activations=QuantSpec(8, symmetric=False))
    arriving = {}
    see = watch(made, {user.name for layer in layers_of(model) for user in layer.users}, lambda *seen: keep(*seen))

    def keep(operator, x, y):
        if isinstance(operator, RoundedInput):
            arriving[operator.name] = operator, x, y

    outputs(see, batches)
    assert len(arriving) == {"m": 2, "c": 3, "g": 9}[name[0]]
    monkeypatch.setattr(module, "exact", lambda x, w: False)
    for operator, x, y in arriving.values():
        np.testing.assert_allclose(operator.forward(x, PassMode(training=False))[0], y, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(module, "exact", lambda x, w: pytest.fail("nobody asks whether codes are integers"))
    operator, x, _ = arriving.popitem()[1]
    with pytest.raises(pytest.fail.Exception):
        operator.forward(x, PassMode(training=False))
    monkeypatch.undo()
    plain = outputs(quantise(model, spec, batches, SELF), batches)
    assert 0 < np.linalg.norm(outputs(made, batches) - plain) < 0.1 * np.linalg.norm(plain)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_observers(observer):
    model, batches = untrained("mlp:tiny"), list(sample("mlp:tiny"))
    made = quantise(model, INT8, batches, SELF, activations=INT8, observer=observer)
    plain = outputs(model, batches)
    assert np.linalg.norm(outputs(made, batches) - plain) < 0.1 * np.linalg.norm(plain)


def test_errors_layer_by_layer():
    model, batches = untrained("convnet:tiny"), list(sample("convnet:tiny"))
    layers = layers_of(model)
    rows = {
        method: compare(model, quantise(model, grouped(3, 16), batches, SELF, method=method), layers, batches, SELF)
        for method in ("rtn", "gptq")
    }
    seen = calibrate(model, layers, batches, SELF)
    for row, layer in zip(rows["rtn"], layers):
        off = quantize(layer.matrix, grouped(3, 16)).dequantize() - layer.matrix
        assert row.weights == pytest.approx(np.linalg.norm(off) / np.linalg.norm(layer.matrix), rel=1e-5)
        assert row.bits == 8 * row.nbytes / layer.matrix.size and row.before == 4 * layer.matrix.size
        # Without the bias the second moments say what the outputs are off.
        lost = np.sqrt(np.einsum("oi,ij,oj->", off, seen[layer.name].moments, off))
        bias = layer.users[0].bias.data
        total = np.einsum("oi,ij,oj->", layer.matrix, seen[layer.name].moments, layer.matrix)
        if not bias.any():
            assert row.outputs == pytest.approx(lost / np.sqrt(total), rel=1e-3)
    assert rows["rtn"][0].outputs == pytest.approx(rows["rtn"][0].arriving)
    assert all(better.outputs < plain.outputs for better, plain in zip(rows["gptq"], rows["rtn"]))


def test_gradients_foresee_the_loss():
    """The gradients are those of the loss, and their squares those of single samples."""
    model, loss, (batch,) = untrained("mlp:tiny"), SoftmaxCrossEntropy(), list(sample("mlp:tiny", 1))
    layer = layers_of(model)[1]
    found = gradients(model, loss, batch.x, batch.y)[layer.name]
    weight = layer.parameter.data

    def at(step):
        weight[3, 4] += step
        value = evaluate(model, loss, [batch], SELF).loss
        weight[3, 4] -= step
        return value

    assert found[3, 4] == pytest.approx((at(0.01) - at(-0.01)) / 0.02, rel=1e-2)
    squares = [gradients(model, loss, x[None], y[None])[layer.name] ** 2 for x, y in zip(batch.x, batch.y)]
    mean = fisher(model, loss, [layer], [batch], SELF)[layer.name]
    np.testing.assert_allclose(mean, np.mean(squares, axis=0).T, rtol=1e-5)


def test_options():
    assert [spec.bits for spec in options_of(INT8, [2, 3])] == [2, 3]
    assert len(options_of(grouped(3, 32))) == 7 * 4
    with pytest.raises(ValueError, match="widths are those of linear codes"):
        options_of(PRESETS["NF4"])


# ---------------------------------------------------------------------------------------------- what is refused


def test_what_cannot_be_done():
    model, batches = untrained("mlp:tiny"), list(sample("mlp:tiny"))

    def refused(told, spec=INT8, use=batches, **more):
        with pytest.raises(ValueError, match=told):
            quantise(model, spec, use, SELF, **more)

    refused("groups of 4096 fit nowhere: the longest rows of weights have 64", grouped(4, 4096))
    refused("method: expected one of rtn, gptq", method="magic")
    refused("observer: expected one of", activations=INT8, observer="oracle")
    refused("activations: expected linear codes with one scale", activations=grouped(8, 32))
    refused("hqq moves zero points, and codes nf4 have none", PRESETS["NF4"], method="hqq")
    refused(r"0\.1\.weight: .* of another kind", PRESETS["VSQ"], method="gptq")
    refused("no sample has come to", method="gptq", use=[])
    refused("nothing was observed", activations=INT8, use=[])
    wrong = [Batch(0, np.ones((2, 9), F), np.zeros(2, int), np.arange(2))]
    refused("do not go through the model.*expected", method="awq", use=wrong)
    model.parameters()[0].data[3, 2] = np.nan
    with pytest.raises(ValueError, match=r"0\.1\.weight\[3, 2\] is nan: this model is broken"):
        expect_finite(model)
    with pytest.raises(ValueError, match=r"0\.1\.weight: x\[2, 3\] is nan"):
        quantise(model, INT8, batches, SELF)
    with pytest.raises(ValueError, match="samples 0 and on is nan"):
        evaluate(model, SoftmaxCrossEntropy(), batches, SELF)


def test_calibration_on_few_samples():
    """A warning names the layers with fewer rows of samples than inputs that are not always 0."""
    model, batches = untrained("mlp:tiny"), list(sample("mlp:tiny", batches=3))
    first = layers_of(model)[0]
    for method, warned in (("gptq", True), ("awq", True), ("rtn", False)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            quantise(model, grouped(4, 16), batches, SELF, method=method)
        assert len(found) == warned
        if warned:
            text = f"calibration: expected at least as many rows of samples as inputs; .* {first.name} \\(24 for 64\\)"
            assert re.search(text, str(found[0].message))
    for batch in batches:
        batch.x[:, :5] = 0  # 40 of 64 inputs
    more = [*batches, *batches]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantise(model, grouped(4, 16), more, SELF, method="gptq")


def test_gptq_on_few_samples_of_dead_inputs():
    """Weights of inputs that these samples do not have are rounded to nearest: other samples need them."""
    model, spec = untrained("mlp:tiny"), grouped(3, 16)
    seen, others = list(sample("mlp:tiny", batches=1, size=2)), list(sample("mlp:tiny", batches=4, seed=5))
    seen[0].x[:, :4] = 0
    exact = outputs(model, others)
    off = {
        method: np.linalg.norm(outputs(quantise(model, spec, seen, SELF, method=method), others) - exact)
        for method in ("rtn", "gptq")
    }
    assert off["gptq"] < 1.2 * off["rtn"]


def test_options_that_do_not_fit():
    """Scales of 2 bits that are too large for fp16 are no option, and the others are."""
    model = untrained("mlp:tiny")
    layers = layers_of(model)
    layers[0].parameter.data[0, 0] = 1e6
    specs = options_of(QuantSpec(2, granularity=PerChannel(0), scale="fp16"), (2, 4, 8))
    made = mixture(model, layers, specs, {}, "rtn", lambda layer, weight: 1 / weight.codes.spec.bits, SELF)
    assert np.isinf(made.table.costs[0]).tolist() == [True, True, False] and np.isfinite(made.table.costs[1:]).all()
    nbytes = [sum(weights[at].nbytes for weights in made.weights) for at in range(3)]
    assert [made.budget(specs[0], bits) for bits in (2, 4, 8)] == nbytes
    assert made.budget(specs[0], 3) == (nbytes[0] + nbytes[1]) / 2
    assert not made.has(made.uniform(specs[0])) and made.has(made.uniform(specs[2]))
    for search in SEARCHES:
        choice = made.choose(search, nbytes[2], SELF)
        assert choice[0] == 2 and np.isfinite(outputs(made.chosen(choice), sample("mlp:tiny"))).all()
    with pytest.raises(
        ValueError, match=rf"a layer cannot be quantised: {re.escape(layers[0].name)}: a scale of 1e\+06"
    ):
        mixture(model, layers, specs[:2], {}, "rtn", lambda layer, weight: 1.0, SELF)
    with pytest.raises(
        ValueError, match=rf"a layer cannot be quantised: {re.escape(layers[0].name)}: a scale of 1e\+06"
    ):
        quantise(model, specs[0], [], SELF)


def test_batches_are_dealt():
    """Every sample once, in the same micro-batches for any number of ranks."""

    class Numbers:
        def __len__(self):
            return 100

        def take(self, indices):
            return indices, indices

    for ranks in (1, 3, 7):
        dealt_out = [batch for rank in range(ranks) for batch in dealt(Numbers(), 50, 8, rank, ranks)]
        dealt_out.sort(key=lambda batch: batch.number)
        assert [batch.number for batch in dealt_out] == list(range(7))
        assert np.concatenate([batch.x for batch in dealt_out]).tolist() == list(range(0, 100, 2))
    assert len(dealt(Numbers(), 1000, 64, 0, 1)) == 2 and dealt(Numbers(), 0, 8, 0, 1) == []


# ---------------------------------------------------------------------------------------------- trained on digits


@pytest.fixture(scope="module", params=["mlp", "convnet"])
def job(request, tmp_path_factory):
    """A model that reads digits, out of a checkpoint, as the recipe has it but for half as many epochs."""
    folder = tmp_path_factory.mktemp(request.param)
    comm = Communicator(SELF)
    with Training(complete({"data": "digits", "model": request.param, "epochs": 12}), comm) as training:
        list(training.run())
        before = training.score()
        training.save(folder)
    made = load_model.from_checkpoint(SELF, folder)
    found = scored(made, made.model)
    assert found.measure == before.accuracy > 0.95 and found.loss == pytest.approx(before.loss, rel=1e-5)
    return made


def shown(job, count=512):
    return dealt(job.task.train, count, 64, 0, 1)


def scored(job, model):
    return evaluate(model, job.loss, dealt(job.task.test, 1000, 100, 0, 1), SELF, job.measure)


@pytest.mark.parametrize(
    "spec, how, most",
    [
        ("int8", {}, 0.003),
        ("int8_row", {"activations": QuantSpec(8, symmetric=False)}, 0.006),
        ("int4_g32", {"method": "gptq"}, 0.01),
    ],
)
def test_what_digits_lose(job, spec, how, most):
    made = quantise(job.model, parse(spec), shown(job), SELF, **how)
    assert scored(job, job.model).measure - scored(job, made).measure <= most
    assert nbytes(made) < nbytes(job.model) / (3.5 if spec.startswith("int8") else 6)


def test_an_engine_evaluates_it_unchanged(job):
    made = quantise(job.model, grouped(4, 32), shown(job), SELF)
    expected = scored(job, made)
    values = {parameter.name: parameter.data.copy() for parameter in made.parameters()}
    engine = DataParallelEngine(made, job.loss, Communicator(SELF), SGD(rate=0.1))
    for parameter in made.parameters():
        parameter.data[...] = values[parameter.name]
    found = engine.evaluate(dealt(job.task.test, 1000, 100, 0, 1), job.measure)
    assert found.measure == expected.measure and found.loss == pytest.approx(expected.loss, rel=1e-6)
    engine.close()
    for parameter in job.model.parameters():
        parameter.data = parameter.data.copy() if parameter.name not in values else values[parameter.name]


@pytest.mark.parametrize("method", METHODS)
def test_files(job, method, tmp_path):
    made = quantise(job.model, grouped(4, 32), shown(job, 64), SELF, method=method, activations=QuantSpec(8))
    load_model.save(tmp_path / "m.safetensors", job, made)
    back = load_model.load(tmp_path / "m.safetensors")
    batches = shown(job, 100)
    assert (outputs(back.model, batches) == outputs(made, batches)).all()
    assert nbytes(back.model) == nbytes(made) and back.settings == job.settings
    assert (tmp_path / "m.safetensors").stat().st_size < nbytes(made) + 8000


def test_files_that_are_none(job, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_model.load(tmp_path / "none")
    safetensors_file.save(tmp_path / "a", {"w": np.ones(3, F)})
    with pytest.raises(ValueError, match="no model in few bits"):
        load_model.load(tmp_path / "a")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An untrained model with divisors and quantised inputs: its file's arrays, header, and outputs."""
    settings = complete({"data": "teacher_classes", "model": "mlp:tiny"})
    task, model, _ = prepare(settings, 1)
    for parameter in name_all(model):
        parameter.data = parameter.first(1).astype(F)
    trained, batches = load_model.TrainedModel(settings, task, model), dealt(task.train, 64, 64, 0, 1)
    made = quantise(model, INT8, batches, SELF, method="smoothquant", activations=QuantSpec(8, symmetric=False))
    path = tmp_path_factory.mktemp("small") / "m.safetensors"
    load_model.save(path, trained, made)
    assert (outputs(load_model.load(path).model, batches) == outputs(made, batches)).all()
    return safetensors_file.load(path), safetensors_file.about(path)


WRONG = {
    "weight": ("0.1.weight", quantize(np.ones((3, 5), F), INT8), r"expected shape \(\d+, \d+\), found \(3, 5\)"),
    "plain weight": ("0.1.weight", np.ones((3, 5), F), r"expected shape \(\d+, \d+\), found \(3, 5\)"),
    "divisor": ("0.1.weight/divisor", np.ones(3, F), r"expected shape \(\d+,\), found \(3,\)"),
    "quantised divisor": ("0.1.weight/divisor", quantize(np.ones(3, F), INT8), "expected an array that is not quant"),
    "bias": ("0.1.bias", quantize(np.ones(3, F), INT8), "expected an array that is not quantised, found Quant"),
    "scales": ("0.1/inputs.scales", np.ones(2, F), r"expected shape \(1, 1\), found \(2,\)"),
    "no zeros": ("0.1/inputs.zeros", None, "it has no"),
    "no bias": ("0.1.bias", None, "it has no"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_arrays_that_do_not_fit(small, tmp_path, wrong):
    (arrays, about), (name, array, words) = small, WRONG[wrong]
    assert name in arrays
    changed = {key: array if key == name else values for key, values in arrays.items()}
    safetensors_file.save(tmp_path / "a", {key: values for key, values in changed.items() if values is not None}, about)
    with pytest.raises(ValueError, match=words) as raised:
        load_model.load(tmp_path / "a")
    assert name in str(raised.value)


@pytest.mark.parametrize("sensitivity", SENSITIVITIES)
def test_widths_of_their_own_beat_one_for_all(job, sensitivity):
    """At no more bytes, scales counted; searches agree, and a budget is kept."""
    spec, batches, layers = grouped(3, 32), shown(job), layers_of(job.model)
    estimate = SENSITIVITIES[sensitivity](job.model, job.loss, layers, batches, SELF)
    made = mixture(job.model, layers, options_of(spec), {}, "rtn", estimate, SELF)
    uniform = made.uniform(spec)
    budget = made.budget(spec, 3.0)
    assert budget == made.table.cost(uniform) == sum(wire_nbytes(spec, layer.shape) for layer in layers)
    chosen = {name: made.choose(name, budget, SELF) for name in SEARCHES}
    for choice in chosen.values():
        assert made.table.cost(choice) <= budget and made.bits(choice) <= made.bits(uniform)
    loss = {name: made.table.loss(choice) for name, choice in chosen.items()}
    assert loss["milp"] == pytest.approx(loss["dp"])
    assert loss["milp"] < made.table.loss(uniform)
    assert made.budget(spec, 2.5) == (made.budget(spec, 2) + made.budget(spec, 3)) / 2
    with pytest.raises(ValueError, match="expected 2 to 8 bits on the average, found 9"):
        made.budget(spec, 9)
    one, own = made.chosen(uniform), made.chosen(chosen["milp"])
    assert scored(job, own).measure > scored(job, one).measure - 0.005
    whole = shown(job, len(job.task.train))
    assert evaluate(own, job.loss, whole, SELF).loss < evaluate(one, job.loss, whole, SELF).loss


def test_checkpoints_that_will_not_do(tmp_path):
    with pytest.raises(CheckpointError, match="expected a folder with checkpoints of chorus train, found"):
        load_model.from_checkpoint(SELF, tmp_path / "none")
    said = complete({"data": "teacher_classes", "model": "mlp:tiny", "steps": 2})
    with Training(said, Communicator(SELF)) as training:
        list(training.run())
        training.engine.flat.places[0].parameter.data[0, 0] = np.nan
        training.save(tmp_path / "nan")
    with pytest.raises(ValueError, match=r"cannot be used: .*weight\[0, 0\] is nan: this model is broken"):
        load_model.from_checkpoint(SELF, tmp_path / "nan")


def test_the_run_is_no_training():
    """Dropout drops nothing where models are watched."""
    model = build("mlp:tiny", (8, 8), 10, dropout=0.5)
    for parameter in name_all(model):
        parameter.data = parameter.first(1).astype(F)
    (batch,) = sample("mlp:tiny", 1)
    assert (forward(model, batch) == model.forward(batch.x, PassMode(training=False))[0]).all()


@pytest.mark.parametrize("spec", ["kmeans3", "kmeans2_row", "kmeans4_g16"])
def test_levels_of_k_means_have_names(spec):
    """Weights are levels of their group, and the error is not above that of even steps of as many bits."""
    model, linear = untrained("mlp:tiny"), parse(spec.replace("kmeans", "int"))
    made, even = (quantise(model, one, [], Communicator(SELF)) for one in (parse(spec), linear))
    for name, weight in weights_of(made).items():
        exact = next(layer for layer in layers_of(model) if layer.name == name).matrix
        errors = [np.square(weights_of(one)[name].quantized.matrix - exact).sum() for one in (made, even)]
        assert errors[0] <= 1.001 * errors[1]
        assert len(np.unique(weight.quantized.matrix[0, :16])) <= 2**weight.quantized.codes.spec.bits
