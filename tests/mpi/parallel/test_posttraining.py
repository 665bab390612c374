"""Models in few bits on many ranks: each shows its share of the samples, and all have the same model in the end."""

import numpy as np
import pytest

pytest.importorskip("safetensors")

from mpi4py import MPI

from parallel.engine.operator_records import buffers_of
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.nn.operator import name_all
from parallel.nn.rewrite import operators_in
from parallel.nn.transforms.quantizable_layers import layers_of
from parallel.ptq import load_model
from parallel.ptq.calibration import calibrate, dealt, observed
from parallel.ptq.evaluation import compare, evaluate
from parallel.ptq.mixed_precision import SENSITIVITIES, mixture, options_of
from parallel.ptq.packed_weights import RoundedInput, packed, weights_of
from parallel.ptq.quantize_model import METHODS, quantise, rounded
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training
from quant import INT8, grouped
from quant.observers import OBSERVERS

SELF = MPI.COMM_SELF
pytestmark = pytest.mark.filterwarnings("ignore:calibration. expected at least as many rows")
"""Most tests calibrate on few samples."""
SAID = {"data": "teacher_classes", "model": "mlp:tiny", "batch": 24, "steps": 4}


class Images:
    """Whole numbers from 0 to 7 in images of 8 x 8: sums of their products are exact."""

    def __len__(self):
        return 90

    def take(self, indices):
        x = (np.arange(64) * (indices[:, None] + 1) % 61 % 8).astype(np.float32)
        return x.reshape(-1, 1, 8, 8), indices % 10


def exact_model():
    """Weights that are small whole numbers: all that goes into any layer is exact, and so are all sums of it."""
    model = build("convnet:tiny", (1, 8, 8), 10)
    for number, parameter in enumerate(name_all(model)):
        values = (np.arange(parameter.size) * (7 + 2 * number) % 5 - 2.0).reshape(parameter.shape)
        parameter.data = values.astype(np.float32)
    return model


def of_all(comm, make, *arguments):
    """What a rank gets with all others, and what it would have got alone of all samples."""
    together_ = make(*arguments, dealt(Images(), 70, 4, comm.Get_rank(), comm.Get_size()), comm)
    return together_, make(*arguments, dealt(Images(), 70, 4, 0, 1), SELF)


@pytest.mark.parametrize("own", [True, False], ids=["Communicator", "mpi4py"])
def test_calibration(comm, world, own):
    model = exact_model()
    layers = layers_of(model)
    many, alone = of_all(comm if own else world, calibrate, model, layers)
    for name, one in alone.items():
        other = many[name]
        assert (other.moments == one.moments).all() and other.rows == one.rows
        assert (other.sizes == one.sizes).all() and (other.largest == one.largest).all()


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("own", [True, False], ids=["Communicator", "mpi4py"])
def test_ranges_of_inputs(comm, world, own, observer):
    """Those that one rank would have found; there are as many micro-batches as leave some ranks with one less."""
    model = exact_model()
    layers = layers_of(model)
    few = packed(
        model, {layer.name: one for layer, one in zip(layers, rounded([(x, INT8) for x in layers], {}, "rtn", SELF))}
    )
    many, alone = of_all(comm if own else world, observed, few, INT8, observer)
    assert {name: found["scales"].tolist() for name, found in many.items()} == {
        name: found["scales"].tolist() for name, found in alone.items()
    }


@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_have_the_model_of_one(comm, method):
    def make(model, batches, some):
        return quantise(model, grouped(4, 16), batches, some, method=method, activations=INT8)

    many, alone = of_all(comm, make, exact_model())
    for name, weight in weights_of(alone).items():
        assert (weights_of(many)[name].quantized.codes.buffer == weight.quantized.codes.buffer).all()
        if weight.quantized.divisor is not None:
            assert (weights_of(many)[name].quantized.divisor == weight.quantized.divisor).all()
    rounds = [{v.name: v.given for _, v in made.walk() if isinstance(v, RoundedInput)} for made in (many, alone)]
    assert len(rounds[0]) == 3 and str(rounds[0]) == str(rounds[1])


def test_scores_and_errors_are_those_of_all_samples(comm):
    model, loss = exact_model(), SoftmaxCrossEntropy()
    layers = layers_of(model)
    few = rounded([(layer, grouped(4, 16)) for layer in layers], {}, "rtn", comm)
    made = packed(model, {layer.name: one for layer, one in zip(layers, few)})
    many, alone = of_all(comm, lambda batches, some: evaluate(made, loss, batches, some, loss.correct))
    assert many == alone and many.count == 70
    many, alone = of_all(comm, lambda batches, some: compare(model, made, layers, batches, some))
    np.testing.assert_allclose([row[5:] for row in many], [row[5:] for row in alone], rtol=1e-9)
    specs = options_of(grouped(3, 16), [2, 3])

    def mixed(sensitivity, batches, some):
        return mixture(model, layers, specs, {}, "rtn", sensitivity(model, loss, layers, batches, some), some)

    for sensitivity in SENSITIVITIES.values():
        many, alone = of_all(comm, mixed, sensitivity)
        np.testing.assert_allclose(many.table.losses, alone.table.losses, rtol=1e-6)
        assert len(set(comm.allgather(many.choose("dp", many.budget(specs[0], 2.5), comm)))) == 1


LAYOUTS = ("dp", "zero1", "zero3", "pp:1f1b", "ps", "sgp")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_any_layout(comm, folder, layout):
    """Written by all, in whatever layout; read by all, and by each alone: its weights are whole, and the same."""
    if layout == "ps" and comm.size == 1:
        pytest.skip("one rank is no server and workers")
    said = {**SAID, "layout": layout}
    if layout == "pp:1f1b":
        if comm.size % 2:
            pytest.skip("two parts of a model make no pipeline of an odd number of ranks")
        said["mesh"] = f"dp={comm.size // 2},pp=2"
    with Training(complete(said), comm) as training:
        list(training.run())
        training.save(folder)
        score = training.score()
    for some in (comm, SELF):
        job = load_model.from_checkpoint(some, folder)
        batches = dealt(job.task.test, 1000, 64, some.Get_rank(), some.Get_size())
        found = evaluate(job.model, job.loss, batches, some, job.measure)
        assert found.loss == pytest.approx(score.loss, rel=1e-5)


def test_a_checkpoint_of_experts_on_a_mesh(comm, folder):
    """Experts of all ranks, and the biases of their routers, on one rank."""
    if comm.size % 2:
        pytest.skip("two ranks share the experts")
    said = {"data": "copy", "model": "gpt-moe:tiny", "length": 16, "batch": 8, "steps": 1, "experts": "4,bias=0.5"}
    with Training(complete({**said, "mesh": f"dp={comm.size},ep=2", "dispatch": "direct:int8"}), comm) as training:
        list(training.run())
        training.save(folder)
        biases = {name: one.values.tolist() for name, one in training.engine.buffers.items()}
    job = load_model.from_checkpoint(SELF, folder)
    assert {name: one.values.tolist() for name, one in buffers_of(operators_in(job.model)).items()} == biases
    assert all(any(values) for values in biases.values())


def test_what_fails_on_one_rank_fails_on_all(comm):
    model = exact_model()
    if comm.Get_rank() == comm.Get_size() - 1:
        model.parameters()[0].data[0, 0, 0, 0] = np.nan
    batches = dealt(Images(), 4 * comm.Get_size(), 4, comm.Get_rank(), comm.Get_size())
    with pytest.raises(ValueError, match="do not go through the model"):
        quantise(model, INT8, batches, comm, method="gptq")
