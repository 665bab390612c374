"""Operators and losses on device arrays, by the code that runs on the host: on the stand-in for CuPy.

It refuses arrays of NumPy, so nothing crosses over unasked, and functions that CuPy lacks.
"""

import sys

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support.device_training import TOLERANCES, trains_as_on_the_host
from support.operator_cases import CASES, PRODUCTS, chains, on_device_as_on_host, play, products_are_right

from collectives import Communicator
from parallel.data.sampler import Batch
from parallel.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn import kernels
from parallel.nn.activation import GELU
from parallel.nn.compose import Sequential
from parallel.nn.dropout import Dropout
from parallel.nn.kernels import fused, reference_kernels
from parallel.nn.linear import Linear
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.optim.optimizers import AdamW
from parallel.runtime.consistency_check import StepFailed


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", CASES)
def test_like_the_host(gpu, name, dtype):
    on_device_as_on_host(sys.modules["cupy"], name, dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", fused.FUSED)
def test_a_chain_is_one_kernel(gpu, name, dtype):
    """Of many operations in the reference, which it is equal to; also into an `out`."""
    cupy, (arrays, numbers) = sys.modules["cupy"], chains(name, dtype)
    expected = getattr(reference_kernels, name)(*(array.copy() for array in arrays), *numbers)
    given = [cupy.asarray(array) for array in arrays]
    gpu.log.clear()
    found = getattr(kernels, name)(*given, *numbers)
    assert [kind for kind, *_ in gpu.log] == ["kernel"] and gpu.fused == [name]
    np.testing.assert_array_equal(found.get(), expected)
    if not name.startswith("biased"):
        assert getattr(kernels, name)(*given, *numbers, out=given[0]) is given[0]
        np.testing.assert_array_equal(given[0].get(), expected)
    elif name != "biased_relu":
        np.testing.assert_array_equal(given[0].get(), arrays[0] + arrays[1])


@pytest.mark.parametrize("name", fused.FUSED)
def test_chains_of_bfloat16(gpu, name):
    """As the reference, by casts around the kernel for float32."""
    cupy, (arrays, numbers) = sys.modules["cupy"], chains(name, np.float32)
    arrays = [one.astype(ml_dtypes.bfloat16) if one.dtype == np.float32 else one for one in arrays]
    expected = getattr(reference_kernels, name)(*(array.copy() for array in arrays), *numbers)
    gpu.log.clear()
    found = getattr(kernels, name)(*map(cupy.asarray, arrays), *numbers)
    assert found.dtype == expected.dtype and len([kind for kind, *_ in gpu.log if kind == "kernel"]) <= 5
    np.testing.assert_array_equal(found.get(), expected)


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
    assert gpu.fused == ["biased_gelu", "masked", "masked", "gelu_backward"]


def test_host_arrays_and_other_types_are_not_fused(gpu):
    for array in (np.ones(3, np.float16), sys.modules["cupy"].asarray(np.arange(3))):
        kernels.relu(array)
    assert gpu.fused == []


def test_what_cupy_cannot_fuse_is_refused(gpu):
    """Or the stand-in would let chains pass that are none: values looked at, functions that are no operations."""
    cupy = sys.modules["cupy"]
    for wrong in (abs, bool, lambda x: x.sum(), cupy.concatenate, lambda x: x.__setitem__(0, x)):
        with pytest.raises((TypeError, AttributeError, ValueError)):
            cupy.fuse(kernel_name="wrong")(wrong)(cupy.asarray(np.ones(2)))
            cupy.cuda.get_current_stream().synchronize()
