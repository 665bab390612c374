"""Operators and losses on CuPy arrays give what they give on NumPy arrays."""

import numpy as np
import pytest
from operators import CASES, on_device_as_on_host


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", CASES)
def test_like_the_host(cupy, name, dtype):
    on_device_as_on_host(cupy, name, dtype)
