"""Products of codes are exact for every length of the sum, and scales and zero points come to them as they should."""

import numpy as np
import pytest

from quant import INT8, VSQ, PerChannel, PerGroup, PerTensor, QuantSpec, grouped, quantize
from quant.ptq.integer_matmul import exact, integer_matmul, product

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
@pytest.mark.parametrize("columns", [PerTensor(), PerChannel(0)])
@pytest.mark.parametrize("symmetric", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_and_zeros(rows, columns, symmetric, bits):
    x = quantize(
        (RNG.standard_normal((5, 40)) + 1).astype(F), QuantSpec(bits, symmetric=symmetric[0], granularity=rows)
    )
    w = quantize(
        (RNG.standard_normal((3, 40)) - 1).astype(F), QuantSpec(bits, symmetric=symmetric[1], granularity=columns)
    )
    expected = x.dequantize(dtype=np.float64) @ w.dequantize(dtype=np.float64).T
    np.testing.assert_allclose(product(x, w), expected, rtol=2e-6, atol=2e-5)


def test_what_has_no_product():
    with pytest.raises(TypeError, match="b: expected int8 or uint8, found float32"):
        integer_matmul(np.ones((1, 1), np.int8), np.ones((1, 1), F))
    with pytest.raises(ValueError, match="no product of shapes"):
        integer_matmul(np.ones((1, 2), np.int8), np.ones((1, 2), np.int8))


WEIGHTS = {
    "tensor": QuantSpec(8),
    "rows": QuantSpec(4, granularity=PerChannel(0)),
    "groups": grouped(4, 16),
    "groups with a rest": grouped(3, 24),
    "groups longer than rows": grouped(4, 64),
    "zero points": grouped(4, 16, symmetric=False),
    "levels": VSQ,
}


@pytest.mark.parametrize("rows", [PerTensor(), PerChannel(0)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_of_groups(name, rows, symmetric):
    x = quantize((RNG.standard_normal((5, 40)) + 1).astype(F), QuantSpec(8, symmetric=symmetric, granularity=rows))
    w = quantize((RNG.standard_normal((3, 40)) - 1).astype(F), WEIGHTS[name])
    expected = x.dequantize(dtype=np.float64) @ w.dequantize(dtype=np.float64).T
    assert exact(x.spec, w.spec)
    np.testing.assert_allclose(product(x, w), expected, rtol=2e-6, atol=2e-5)


def test_a_group_is_exact():
    """Sums beyond 2^24, of numbers that float32 would round one after another."""
    x = np.full((1, 5000), 127, F)
    x[0, 0] = 1
    q, w = quantize(x, QuantSpec(8)), quantize(x, QuantSpec(8))
    assert product(q, w).item() == F(4999 * 127**2 + 1)
    empty = product(quantize(x[:, :0], QuantSpec(8)), quantize(np.ones((3, 0), F), grouped(4, 32)))
    assert empty.tolist() == [[0, 0, 0]]


def test_what_has_no_product_of_groups():
    x = quantize(np.ones((2, 4), F), QuantSpec(8))
    for spec, told in (
        (QuantSpec(4, code="nf4"), "expected linear codes"),
        (QuantSpec(4, symmetric=False, zero="fp16"), "found linear and fp16"),
        (QuantSpec(4, granularity=PerChannel(1)), "scales per tensor or row"),
        (QuantSpec(4, granularity=PerGroup(2, 0)), "scales per tensor or row"),
    ):
        assert not exact(x.spec, spec)
        with pytest.raises(ValueError, match=told):
            product(x, quantize(np.ones((3, 4), F), spec))
    assert not exact(grouped(8, 2), INT8)
    with pytest.raises(ValueError, match="x: expected a matrix"):
        product(quantize(np.ones((2, 4), F), grouped(8, 2)), x)
    with pytest.raises(ValueError, match="the transpose of"):
        product(x, quantize(np.ones((3, 5), F), QuantSpec(8)))
