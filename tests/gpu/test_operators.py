"""Operators and losses on CuPy arrays give what they give on NumPy arrays."""

import ml_dtypes
import numpy as np
import pytest
from support import device_kernel_cases as cases
from support.operator_cases import CASES, PRODUCTS, on_device_as_on_host, products_are_right


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


@pytest.mark.parametrize("dtype", cases.COMMON)
@pytest.mark.parametrize("name", cases.ROWS)
def test_kernels_of_matrices(cupy, name, dtype):
    for shape in cases.SHAPES:
        cases.ROWS[name](cupy, name, dtype, shape)


@pytest.mark.parametrize("dtype", cases.COMMON)
def test_kernels_of_attention(cupy, dtype):
    for shape in cases.HEADS:
        cases.heads_move(cupy, dtype, shape)
        cases.softmax_of_blocks(cupy, dtype, shape)
    cases.rows_without_numbers(cupy, dtype)
    cases.gaps_are_taken_by_the_reference(cupy, dtype)
