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


@pytest.mark.parametrize("unit", [2.0**-300, 1e-12, 1.0, 2.0**40, 1e300])
@pytest.mark.parametrize("name", SPECS)
def test_gptq_without_some_inputs(name, unit):
    """Weights of inputs that are always 0 are rounded to nearest, and no unit of the moments changes a code."""
    w, x = problem()
    x[:, [3, 77]] = 0
    spec = SPECS[name]
    expected = gptq(w, x.T @ x, spec)
    q = gptq(w, x.T @ x * unit, spec)
    if np.log2(unit) % 1 == 0:
        assert q.buffer.tobytes() == expected.buffer.tobytes()
    assert loss(w, q.dequantize(), x) == pytest.approx(loss(w, expected.dequantize(), x), rel=1e-2)
    off = abs(q.dequantize() - w)[:, [3, 77]]
    size = spec.granularity.size if isinstance(spec.granularity, PerGroup) else 200
    scales = np.broadcast_to(q.scales(), (12, q.scales().shape[1]))[:, [3 // size, 77 // size]]
    if name != "MXFP4":  # its steps grow with the number
        assert (off <= scales * 0.52).all()
    assert (off < abs(w[:, [3, 77]])).mean() > 0.5


@pytest.mark.parametrize("samples", [0, 1, 2, 4])
@pytest.mark.parametrize("name", SPECS)
def test_gptq_of_few_samples(name, samples):
    """No worse than rounding to nearest on them, and not far worse on others."""
    w, x = problem()
    spec = SPECS[name]
    plain, found = quantize(w, spec).dequantize(), gptq(w, x[:samples].T @ x[:samples], spec).dequantize()
    if samples:
        assert loss(w, found, x[:samples]) <= loss(w, plain, x[:samples])
    else:
        np.testing.assert_array_equal(found, plain)
    assert loss(w, found, x) < 1.5 * loss(w, plain, x)


def test_gptq_where_its_scales_do_not_fit():
    """Errors that are passed on make the last weights too large for fp16, not so those rounded to nearest."""
    signs = F([-1, -1, -1, -1, -1, -1, -1, 1])
    w = 6e4 * signs[None]
    x = np.eye(8) - 50 * signs * np.ones((8, 1))
    spec = grouped(1, 1, signed=False)  # below 0 there is no code
    np.testing.assert_array_equal(gptq(w, x.T @ x, spec).dequantize(), quantize(w, spec).dequantize())
    with pytest.raises(ValueError, match="does not fit fp16"):
        gptq(w * 10, x.T @ x, spec)


def test_gptq_of_other_kinds():
    w, x = problem()
    with pytest.raises(ValueError, match="moments of shape"):
        gptq(w, np.eye(3), grouped(4, 32))
    for wrong in (np.full((200, 200), np.nan), np.diag(np.full(200, np.inf)), -np.eye(200)):
        for method in (gptq, lambda *given: awq(given[0], given[1], np.ones(200), given[2])):
            with pytest.raises(ValueError, match="moments: expected finite numbers, and none below 0"):
                method(w, wrong, grouped(4, 32))
    with pytest.raises(TypeError, match="moments: expected real numbers, found complex128"):
        gptq(w, np.eye(200) * 1j, grouped(4, 32))
    with pytest.raises(ValueError, match="moments with damping 0: expected a positive definite matrix"):
        gptq(w, np.ones((200, 200)), grouped(4, 32), damping=0)
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
    with pytest.raises(ValueError, match="largest of shape"):
        smoothing(np.ones(1), w)
    with pytest.raises(ValueError, match="expected finite numbers"):
        smoothing(largest * np.nan, w)


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


def test_awq_leaves_out_what_does_not_fit():
    """Scalings that make weights too large for fp16 are no reason to give up the others."""
    w = np.full((2, 64), 3e4, F)
    w[:, 0] = 4e5
    sizes = np.ones(64)
    sizes[0] = 1e6
    spec = grouped(4, 1)
    q, s = awq(w, np.eye(64), sizes, spec)
    assert np.isfinite(q.dequantize()).all() and (s[0] == s.max()).all()
    np.testing.assert_allclose(q.dequantize() / s, w, rtol=1e-3)
    with pytest.raises(ValueError, match="does not fit fp16"):
        awq(w * F(1e3), np.eye(64), sizes, spec)
    for wrong in (np.full(64, np.nan), -np.ones(64), np.ones(3)):
        with pytest.raises(ValueError, match="sizes: expected 64 finite numbers"):
            awq(w, np.eye(64), wrong, spec)


@pytest.mark.parametrize("zero", ["fp32", "fp16", "bf16"])
def test_hqq_far_from_zero(zero):
    """Zero points that no half holds exactly: the range is as much wider as they are off."""
    w = (1e5 + np.random.default_rng(0).standard_normal((4, 64))).astype(F)
    spec = QuantSpec(4, symmetric=False, zero=zero, granularity=PerGroup(32))
    found = hqq(w, spec)
    assert abs(found.dequantize() - w).max() <= 1.01 * found.scales().max()
    assert found.scales().max() <= {"fp32": 0.5, "fp16": 2e5 / 2**10 / 15, "bf16": 2e5 / 2**7 / 15}[zero]


@pytest.mark.parametrize("granularity", [PerGroup(64), PerChannel(0), PerTensor(), PerGroup(24)])
def test_hqq_forgives_outliers(granularity):
    w = np.random.default_rng(0).standard_t(3, (8, 256)).astype(F)
    spec = QuantSpec(3, symmetric=False, zero="fp32", granularity=granularity)
    plain, found = quantize(w, spec).dequantize(), hqq(w, spec).dequantize()
    assert (abs(found - w) ** 0.7).sum() < 0.995 * (abs(plain - w) ** 0.7).sum()
    with pytest.raises(ValueError, match="floating-point zeros"):
        hqq(w, spec.replace(zero="integer"))
    assert hqq(w[:0], spec.replace(granularity=PerGroup(64))).size == 0
