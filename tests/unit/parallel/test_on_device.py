"""Operators and losses on device arrays, by the code that runs on the host: on the stand-in for CuPy.

It refuses arrays of NumPy, so nothing crosses over unasked, and functions that CuPy lacks.
"""

import sys

import numpy as np
import pytest
from operators import CASES, on_device_as_on_host


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", CASES)
def test_like_the_host(gpu, name, dtype):
    on_device_as_on_host(sys.modules["cupy"], name, dtype)
