"""The quantiser's benchmark: its rows are what is measured."""

import numpy as np
import pytest

from quant import INT8, kernels
from quant.cli import bench


@pytest.mark.parametrize("there", [True, False])
def test_numba_has_rows_where_it_is(monkeypatch, there):
    monkeypatch.setattr(kernels, "_module", lambda name: {"absmax": kernels.absmax.__wrapped__} if there else {})
    names = [one.name for one in bench.chorus_side("int8", INT8, np.ones(32, np.float32))]
    expected = ["numba", "numpy"] if there else ["numpy"]
    assert names == [f"int8 {what} {form}" for form in expected for what in ("quantize", "dequantize", "add")]
