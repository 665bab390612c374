"""The worked example: 16 numbers in 2 bits, and the distance (Frobenius) to what comes back."""

import numpy as np
import pytest

from quant import PerChannel, PerGroup, PerTensor, QuantSpec, quantize

W = np.array([[2.09, -0.98, 1.48, 0.09], [0.05, -0.14, -1.08, 2.12], [-0.91, 1.92, 0, -1.03], [1.87, 0, 1.53, 1.49]])


@pytest.mark.parametrize(
    ("options", "distance"),
    [
        ({"granularity": PerTensor()}, 2.28),
        ({"granularity": PerChannel(0)}, 2.08),
        ({"granularity": PerGroup(2)}, 1.70),
        ({"granularity": PerTensor(), "q_range": "full"}, 2.05),
        ({"granularity": PerChannel(0), "q_range": "full"}, 2.21),
        ({"granularity": PerTensor(), "symmetric": False}, 0.86),
        ({"granularity": PerChannel(0), "symmetric": False}, 0.63),
        ({"granularity": PerTensor(), "symmetric": False, "signed": False}, 0.86),
        ({"granularity": PerTensor(), "code": "kmeans"}, 0.305),
    ],
)
def test_distances(options, distance):
    found = np.linalg.norm(quantize(W, QuantSpec(2, **options)).dequantize().astype(np.float64) - W)
    assert found == pytest.approx(distance, abs=0.0005 if distance < 0.5 else 0.005)


def test_columns_are_rows_of_the_transposed():
    for kind in (PerChannel, lambda axis: PerGroup(2, axis)):
        columns = quantize(W, QuantSpec(2, granularity=kind(1)))
        rows = quantize(W.T.copy(), QuantSpec(2, granularity=kind(0)))
        np.testing.assert_array_equal(columns.dequantize(), rows.dequantize().T)
        assert columns.buffer.tobytes() == rows.buffer.tobytes()
        np.testing.assert_array_equal(columns.integers(), rows.integers().T)
