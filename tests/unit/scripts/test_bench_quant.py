"""The quantiser's benchmark: its rows are what is measured."""

import numpy as np
import pytest

from quant import INT8, kernels
from quant.cli import bench


@pytest.mark.parametrize("there", [True, False])
def test_compiled_kernels_have_rows_where_they_are(monkeypatch, there):
    monkeypatch.setattr(kernels, "available", lambda form: there)
    names = [one.name for one in bench.chorus_side("int8", INT8, np.ones(32, np.float32))]
    expected = ["c", "numpy"] if there else ["numpy"]
    assert names == [f"int8 {what} {form}" for form in expected for what in ("quantize", "dequantize", "add")]
