"""Operators and losses on CuPy arrays give what they give on NumPy arrays."""

import ml_dtypes
import numpy as np
import pytest
from support.operator_cases import CASES, PRODUCTS, chains, on_device_as_on_host, products_are_right

from parallel.nn import kernels
from parallel.nn.kernels import fused, reference_kernels


@pytest.fixture(autouse=True)
def one_rank(world):
    if world.size > 1:
        pytest.skip("the same on one rank")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", CASES)
def test_like_the_host(cupy, name, dtype):
    on_device_as_on_host(cupy, name, dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_half_types(cupy, name, dtype):
    products_are_right(cupy, name, dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", fused.FUSED)
def test_fused_chains(cupy, name, dtype):
    """What CuPy makes of the reference is the reference."""
    arrays, numbers = chains(name, dtype)
    expected = getattr(reference_kernels, name)(*(array.copy() for array in arrays), *numbers)
    found = getattr(kernels, name)(*map(cupy.asarray, arrays), *numbers)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.get(), expected, rtol=0, atol=64 * np.finfo(dtype).eps * 10)
