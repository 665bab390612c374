"""What knows the inputs does better on them than plain rounding, and no worse where there is nothing to know."""

import numpy as np
import pytest

from quant import MXFP4, NVFP4, PerChannel, PerGroup, PerTensor, QuantSpec, grouped, quantize
from quant.ptq import awq, gptq, hqq, smoothing

F = np.float32


def problem(outputs=12, inputs=200, samples=500, seed=0):
    """Weights, and inputs that hang on each other and are of different sizes."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((inputs // 4, inputs)) * np.exp(rng.normal(0, 1, inputs))
    x = rng.standard_normal((samples, inputs // 4)) @ mixed + 0.1 * rng.standard_normal((samples, inputs))
    return rng.standard_normal((outputs, inputs)).astype(F), x


def loss(w, back, x):
    return float(np.linalg.norm(x @ (w - back).T) / np.linalg.norm(x @ w.T))


SPECS = {
    "int4 rows": QuantSpec(4, granularity=PerChannel(0)),
    "int4 tensor": QuantSpec(4),
    "int3 groups": grouped(3, 32),
    "int4 groups across blocks": grouped(4, 48),
    "int4 zeros": grouped(4, 64, symmetric=False),
    "MXFP4": MXFP4,
}


@pytest.mark.parametrize("name", SPECS)
def test_gptq_keeps_products(name):
    w, x = problem()
    spec = SPECS[name]
    q = gptq(w, x.T @ x, spec)
    assert q.spec.replace(rounding=spec.rounding) == spec and q.shape == w.shape
    assert loss(w, q.dequantize(), x) < 0.6 * loss(w, quantize(w, spec).dequantize(), x)


@pytest.mark.parametrize("name", SPECS)
def test_gptq_is_rounding_where_inputs_are_independent(name):
    w, _ = problem()
    np.testing.assert_array_equal(
        gptq(w, 3 * np.eye(200), SPECS[name]).dequantize(), quantize(w, SPECS[name]).dequantize()
    )


def test_gptq_in_blocks_is_gptq_input_by_input(monkeypatch):
    from quant.ptq import gptq as function

    module = __import__("sys").modules[function.__module__]
    w, x = problem()
    for spec in (grouped(4, 48, "fp32"), grouped(4, 7, "fp32"), QuantSpec(4, granularity=PerChannel(0))):
        monkeypatch.setattr(module, "BLOCK", 128)
        blocks = gptq(w, x.T @ x, spec).dequantize()
        monkeypatch.setattr(module, "BLOCK", 1000)
        np.testing.assert_allclose(blocks, gptq(w, x.T @ x, spec).dequantize(), atol=1e-6)


def test_gptq_without_some_inputs():
    w, x = problem()
    x[:, [3, 77]] = 0
    back = gptq(w, x.T @ x, grouped(4, 32)).dequantize()
    assert (back[:, [3, 77]] == 0).all() and np.isfinite(back).all()


def test_gptq_of_other_kinds():
    w, x = problem()
    with pytest.raises(ValueError, match="moments of shape"):
        gptq(w, np.eye(3), grouped(4, 32))
    for spec in (
        NVFP4,
        QuantSpec(4, granularity=PerChannel(1)),
        QuantSpec(2, code="kmeans"),
        grouped(4, 2, q_range="peak"),
    ):
        with pytest.raises(ValueError, match="of another kind"):
            gptq(w, x.T @ x, spec)


def test_smoothing_moves_what_is_large():
    w, x = problem()
    x[:, 5] *= 100
    largest = abs(x).max(axis=0)
    s = smoothing(largest, w)
    np.testing.assert_allclose((x / s) @ (w * s).T, x @ w.T, rtol=1e-4, atol=1e-2)

    def error(s):
        activations = quantize((x / s).astype(F), QuantSpec(8)).dequantize()
        weights = quantize(w * s, QuantSpec(8, granularity=PerChannel(0))).dequantize()
        return np.linalg.norm(activations @ weights.T - x @ w.T)

    assert error(s) < 0.5 * error(np.ones_like(s))
    np.testing.assert_allclose(abs(x / smoothing(largest, w, 1)).max(axis=0), 1, rtol=1e-5)
    np.testing.assert_allclose(abs(w * smoothing(largest, w, 0)).max(axis=0), 1, rtol=1e-5)
    assert smoothing(np.zeros(3), np.ones((2, 3))).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="alpha: expected 0 to 1"):
        smoothing(largest, w, 2)


def test_awq_keeps_large_inputs():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((16, 128)).astype(F)
    x = rng.standard_normal((400, 128)) * np.exp(rng.normal(0, 1.5, 128))
    spec = grouped(3, 32)
    q, s = awq(w, x.T @ x, abs(x).mean(axis=0), spec)
    assert loss(w, q.dequantize() / s, x) < 0.9 * loss(w, quantize(w, spec).dequantize(), x)
    level, ones = awq(w, np.eye(128), np.zeros(128), spec)
    assert (ones == 1).all() and level.buffer.tobytes() == quantize(w, spec).buffer.tobytes()
    with pytest.raises(ValueError, match="moments of shape"):
        awq(w, np.eye(3), np.ones(128), spec)


@pytest.mark.parametrize("granularity", [PerGroup(64), PerChannel(0), PerTensor(), PerGroup(24)])
def test_hqq_forgives_outliers(granularity):
    w = np.random.default_rng(0).standard_t(3, (8, 256)).astype(F)
    spec = QuantSpec(3, symmetric=False, zero="fp32", granularity=granularity)
    plain, found = quantize(w, spec).dequantize(), hqq(w, spec).dequantize()
    assert (abs(found - w) ** 0.7).sum() < 0.995 * (abs(plain - w) ** 0.7).sum()
    with pytest.raises(ValueError, match="floating-point zeros"):
        hqq(w, spec.replace(zero="integer"))
    assert hqq(w[:0], spec.replace(granularity=PerGroup(64))).size == 0
