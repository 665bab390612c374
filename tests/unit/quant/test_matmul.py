"""Products of codes are exact for every length of the sum, and scales and zero points come to them as they should."""

import numpy as np
import pytest

from quant import PerChannel, PerGroup, PerTensor, QuantSpec, quantize
from quant.matmul import integer_matmul, matmul

F = np.float32
RNG = np.random.default_rng(4)


@pytest.mark.parametrize("k", [0, 1, 513, 514, 515, 1024, 1025, 5000])
@pytest.mark.parametrize("types", [(np.int8, np.int8), (np.uint8, np.int8), (np.uint8, np.uint8)])
def test_exact_at_the_extremes(types, k):
    """All products as large as can be, of one sign: what float32 alone would round."""
    a, b = (
        np.full(shape, np.iinfo(kind).min or np.iinfo(kind).max, kind) for shape, kind in zip(((3, k), (k, 2)), types)
    )
    if k:
        a[0, 0] = b[0, 1] = 1
    found = integer_matmul(a, b)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, a.astype(np.int64) @ b.astype(np.int64))


def test_a_long_sum():
    a = np.full((1, 140000), -128, np.int8)
    found = integer_matmul(a, a.T.copy())
    assert found.dtype == np.int64 and found.item() == 140000 * 128**2


@pytest.mark.parametrize("rows", [PerTensor(), PerChannel(0), PerChannel(-2)])
@pytest.mark.parametrize("columns", [PerTensor(), PerChannel(1)])
@pytest.mark.parametrize("symmetric", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_and_zeros(rows, columns, symmetric, bits):
    x = quantize(
        (RNG.standard_normal((5, 40)) + 1).astype(F), QuantSpec(bits, symmetric=symmetric[0], granularity=rows)
    )
    w = quantize(
        (RNG.standard_normal((40, 3)) - 1).astype(F), QuantSpec(bits, symmetric=symmetric[1], granularity=columns)
    )
    expected = x.dequantize(dtype=np.float64) @ w.dequantize(dtype=np.float64)
    np.testing.assert_allclose(matmul(x, w), expected, rtol=2e-6, atol=2e-5)


def test_what_has_no_product():
    with pytest.raises(TypeError, match="b holds float32"):
        integer_matmul(np.ones((1, 1), np.int8), np.ones((1, 1), F))
    with pytest.raises(ValueError, match="no product of shapes"):
        integer_matmul(np.ones((1, 2), np.int8), np.ones((1, 2), np.int8))
    plain = quantize(np.ones((4, 4), F), QuantSpec(8))
    with pytest.raises(ValueError, match="must not change along k"):
        matmul(quantize(np.ones((4, 4), F), QuantSpec(8, granularity=PerGroup(2))), plain)
    with pytest.raises(ValueError, match="must not change along k"):
        matmul(plain, quantize(np.ones((4, 4), F), QuantSpec(8, granularity=PerChannel(0))))
    with pytest.raises(ValueError, match="not linear"):
        matmul(plain, quantize(np.ones((4, 4), F), QuantSpec(4, code="nf4")))
