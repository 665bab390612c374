"""Operators and losses on device arrays, by the code that runs on the host: on the stand-in for CuPy.

It refuses arrays of NumPy, so nothing crosses over unasked, and functions that CuPy lacks.
"""

import sys

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support.device_training import TOLERANCES, trains_as_on_the_host
from support.operator_cases import CASES, PRODUCTS, on_device_as_on_host, play, products_are_right

from collectives import Communicator
from parallel.data.sampler import Batch
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.memory_ledger import Workload
from parallel.engine.settings import Settings
from parallel.nn import kernels
from parallel.nn.activation import GELU
from parallel.nn.compose import Sequential
from parallel.nn.dropout import Dropout
from parallel.nn.linear import Linear
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.nn.operator import ArraySpec
from parallel.optim.optimizers import AdamW
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.runtime.consistency_check import StepFailed
from parallel.trainer import engine_checkpoint


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", CASES)
def test_like_the_host(gpu, name, dtype):
    on_device_as_on_host(sys.modules["cupy"], name, dtype)


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_steps(gpu, layout, precision):
    comm = Communicator(MPI.COMM_SELF.Dup())
    trains_as_on_the_host(comm, layout, precision)
    comm.Free()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_host_waits_of_a_step(gpu, precision):
    """Two, for the loss and the norm of the gradient, however many operators and micro-batches a step has."""
    comm = Communicator(MPI.COMM_SELF.Dup())
    settings = Settings(precision=precision, device="cuda", clip=1.0)
    model, x = build("gpt:tiny", (16,), 256, dropout=0.1), np.arange(64).reshape(4, 16)
    with DataParallelEngine(model, SoftmaxCrossEntropy(), comm, AdamW(rate=1e-3), settings) as engine:
        for count in (1, 3):
            gpu.log.clear()
            assert engine.step([Batch(number, x, x, np.arange(4)) for number in range(count)]).loss > 0
            assert sum(kind == "read" for kind, *_ in gpu.log) == 2
    comm.Free()


@pytest.mark.parametrize("kind, layout", [(DataParallelEngine, "dp"), (Pipeline, "pp:1f1b")])
def test_ledger_of_sequences_longer_than_a_block(gpu, kind, layout):
    comm, x = Communicator(MPI.COMM_SELF.Dup()), np.arange(300).reshape(1, 300) % 256
    given = build("gpt:tiny", (300,), 256), SoftmaxCrossEntropy()
    optimizer, settings = AdamW(rate=1e-3), Settings(device="cuda", layout=layout)
    with kind(*given, comm, optimizer, settings) as engine:
        engine.step([Batch(0, x, x, np.arange(1))])
        assert engine.ledger.allocated == engine.ledger.predicted
    workload = Workload(0, 1, lambda _: (ArraySpec(x.shape, x.dtype), ArraySpec(x.shape, x.dtype)), [(1,)])
    forecast = kind.forecast(*given, optimizer, workload, settings)
    assert forecast.predicted == engine.ledger.predicted
    comm.Free()


def test_checks_of_a_step_are_made_when_numbers_are_read(gpu):
    comm = Communicator(MPI.COMM_SELF.Dup())
    tokens = np.full((2, 8), 3)
    with DataParallelEngine(
        build("gpt:tiny", (8,), 256), SoftmaxCrossEntropy(), comm, AdamW(rate=1e-3), Settings(device="cuda")
    ) as engine:
        for wrong, text in ((256, "token 256 is not below 256"), (-1, "token -1 is below 0")):
            with pytest.raises(StepFailed, match=text):
                engine.step([Batch(0, np.where(np.eye(2, 8), wrong, tokens), tokens, np.arange(2))])
        with pytest.raises(StepFailed, match="target 300 is not below 256"):
            engine.step([Batch(0, tokens, tokens * 100, np.arange(2))])
        assert engine.updates == 0
        assert engine.step([Batch(0, tokens, tokens, np.arange(2))]).loss > 0
    comm.Free()


@pytest.mark.parametrize("vocabulary", [5, 3000])
def test_gradient_of_an_embedding(gpu, vocabulary):
    """As on the host, by products with memberships in rows of the table, or in runs of equal tokens."""
    random = np.random.default_rng(0)
    tokens, dy = random.integers(0, vocabulary, 1500), random.standard_normal((1500, 3))
    tokens[:9] = 4
    expected = kernels.embedding_gradient(dy, tokens, np.empty((vocabulary, 3)))
    cupy = sys.modules["cupy"]
    gpu.log.clear()
    found = kernels.embedding_gradient(cupy.asarray(dy), cupy.asarray(tokens), cupy.empty((vocabulary, 3)))
    assert not any(kind == "read" for kind, *_ in gpu.log)
    np.testing.assert_allclose(found.get(), expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_half_types(gpu, name, dtype):
    products_are_right(sys.modules["cupy"], name, dtype)


def test_operators_take_them(gpu):
    play(Sequential([Linear(6, 4), GELU(), Dropout(0.5)]), np.ones((3, 6)), np.float32, sys.modules["cupy"])
    assert gpu.launched == ["biased_gelu", "masked_of", "masked_of", "gelu_backward_of", "column_sums"]


def test_host_arrays_and_other_types_have_other_kernels(gpu):
    for array in (np.ones(3, np.float16), sys.modules["cupy"].asarray(np.arange(3))):
        kernels.relu(array)
    assert gpu.launched == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_hooks_and_changed_weights(gpu, precision):
    """Arrays on the device: gradients that a hook gets, and weights that are changed between steps."""
    xp, comm, seen = sys.modules["cupy"], Communicator(MPI.COMM_SELF.Dup()), []
    model, x = build("gpt:tiny", (16,), 256), np.arange(64).reshape(4, 16)
    weight, batch = model.items[1].items[0].inner.items[1].weight, Batch(0, x, x, np.arange(4))
    settings = Settings(precision=precision, device="cuda")

    def hook(gradient):
        seen.append((type(gradient), gradient.shape))
        gradient[...] = 0

    with DataParallelEngine(model, SoftmaxCrossEntropy(), comm, AdamW(rate=1e-3, decay=0.0), settings) as engine:
        handle = weight.register_hook(hook)
        before = engine_checkpoint.state_dict(engine)[weight.name]
        engine.step([batch])
        assert seen == [(xp.ndarray, weight.shape)]
        np.testing.assert_array_equal(engine_checkpoint.state_dict(engine)[weight.name], before)
        weight.data[1] = 0.5
        handle.remove()
        found = engine_checkpoint.state_dict(engine)[weight.name]
        assert (found != before).any(axis=1).sum() == 1 and (found[1] == 0.5).all()
        while engine.updates < 2:  # in fp16 with a smaller loss scale
            engine.step([batch])
        moved = engine_checkpoint.state_dict(engine)[weight.name]
        assert (moved != found).any() and np.abs(moved - found).max() < 0.01
    comm.Free()
