"""Operators and losses on device arrays, by the code that runs on the host: on the stand-in for CuPy.

It refuses arrays of NumPy, so nothing crosses over unasked, and functions that CuPy lacks.
"""

import sys

import numpy as np
import pytest
from mpi4py import MPI
from support.device_training import TOLERANCES, trains_as_on_the_host
from support.operator_cases import CASES, chains, on_device_as_on_host, play

from collectives import Communicator
from parallel.data_parallel.layouts import LAYOUTS
from parallel.nn import kernels
from parallel.nn.activation import GELU
from parallel.nn.compose import Sequential
from parallel.nn.dropout import Dropout
from parallel.nn.kernels import fused, reference_kernels
from parallel.nn.linear import Linear


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


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_steps(gpu, layout, precision):
    comm = Communicator(MPI.COMM_SELF.Dup())
    trains_as_on_the_host(comm, layout, precision)
    comm.Free()


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
