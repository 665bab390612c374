"""NaN and infinity, constants, nothing, zeros, the smallest and the largest numbers: each has a meaning or an error."""

from importlib import import_module

import numpy as np
import pytest

from quant import (
    INT4_G32,
    INT8,
    MXFP8,
    NF4,
    NVFP4,
    PRESETS,
    Q4_0,
    VSQ,
    PerChannel,
    PerGroup,
    QuantSpec,
    Scales,
    grouped,
    kernels,
    quantize,
)

F = np.float32
ASYMMETRIC = QuantSpec(8, symmetric=False)
SPECS = PRESETS | {
    "zeros": ASYMMETRIC,
    "float zeros": ASYMMETRIC.replace(zero="fp32"),
    "unsigned": QuantSpec(8, signed=False),
}


@pytest.fixture(params=["reference", "compiled"], autouse=True)
def form(request):
    if request.param == "compiled":
        pytest.importorskip("quant.kernels._codecs")
        import_module("quant.kernels.compiled_codecs")
    with kernels.forms(*([] if request.param == "reference" else [request.param])):
        yield


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", SPECS)
def test_no_code_for_what_is_not_finite(name, value):
    x = np.ones((3, 64), F)
    x[1, 5] = value
    with pytest.raises(ValueError, match=r"x\[1, 5\] is -?(nan|inf), which has no code"):
        quantize(x, SPECS[name])
    with pytest.raises(ValueError, match="which has no code"):
        quantize(x, INT8, scales=F(1))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", [name for name in SPECS if name != "VSQ"])
def test_a_poisoned_group(name, value):
    """All of its group is NaN, and nothing else is another."""
    x = np.ones((3, 128), F)
    x[1, 5] = value
    q = quantize(x, SPECS[name], nonfinite="poison")
    back, size = q.dequantize().reshape(-1), q.layout.blocks.size
    first = 133 // size * size
    assert np.isnan(back[first : first + size]).all()
    clean = quantize(np.ones((3, 128), F), SPECS[name]).dequantize().reshape(-1)
    others = np.ones(x.size, bool)
    others[first : first + size] = False
    np.testing.assert_array_equal(back[others], clean[others])


def test_integers_hold_no_poison():
    with pytest.raises(ValueError, match="scales in uint4 have no NaN"):
        quantize(np.full(16, np.nan, F), VSQ, nonfinite="poison")
    with pytest.raises(ValueError, match="nonfinite: expected raise or poison"):
        quantize(np.ones(16, F), INT8, nonfinite="ignore")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 3.0, -3.0, 1e-30])
def test_constants(name, value):
    """Zeros come back as zeros, and a constant as itself, to the digits of scale and code."""
    if (value == 1e-30 and SPECS[name].scales.format == "fp16") or (name == "unsigned" and value < 0):
        return
    back = quantize(np.full((2, 64), value, F), SPECS[name]).dequantize()
    assert (
        (back == 0).all()
        if value == 0
        else np.allclose(back, value, rtol=0.13 if name in ("MXFP4", "VSQ", "MXFP8") else 0.002)
    )


@pytest.mark.parametrize("name", SPECS)
def test_nothing(name):
    for shape in ((0,), (0, 64), (3, 0)):
        q = quantize(np.empty(shape, F), SPECS[name])
        assert q.dequantize().shape == shape


@pytest.mark.parametrize("name", [name for name in SPECS if name != "float zeros"])
def test_a_group_of_zeros_among_others(name):
    x = np.zeros((4, 64), F)
    x[2] = np.linspace(-1, 1, 64)
    back = quantize(x, SPECS[name]).dequantize()
    assert (back[[0, 1, 3]] == 0).all() and abs(back[2]).max() > 0.5


@pytest.mark.parametrize("spec", [INT8, ASYMMETRIC, QuantSpec(8, code="e4m3"), NF4], ids=str)
def test_denormals(spec):
    """A scale is never 0 where the group is not, so that the largest element never gets lost."""
    for tiny in (1e-45, 1e-40, 3e-38):
        x = np.linspace(-tiny, tiny, 33).astype(F)
        back = quantize(x, spec).dequantize()
        assert np.isfinite(back).all() and abs(back).max() > 0
        assert abs(back - x).max() <= max(tiny, 1e-45) * 1.01


def test_what_is_too_small_for_half_precision():
    x = np.full(32, 1e-9, F)
    assert quantize(x, INT4_G32).dequantize().max() == F(7 * 2.0**-24) or quantize(x, INT4_G32).dequantize().max() == 0
    assert (quantize(x, Q4_0).dequantize() == 0).all()  # as ggml's


def test_huge_outliers():
    x = np.ones(256, F)
    x[7] = 3e38
    back = quantize(x, grouped(8, 32, "fp32")).dequantize()
    assert back[7] == pytest.approx(3e38, rel=1e-6) and (back[:7] == 0).all() and np.allclose(back[32:], 1)
    for spec in (INT8, ASYMMETRIC, MXFP8, NVFP4, grouped(4, 32, "bf16")):
        wide = np.linspace(-3.3e38, 3.3e38, 32).astype(F)
        assert np.isfinite(quantize(wide, spec).dequantize()).all()
    with pytest.raises(ValueError, match=r"a scale of .*e\+37 does not fit fp16, whose largest is 6.55e\+04"):
        quantize(x, INT4_G32)


@pytest.mark.parametrize("scale", ["fp32", "e8m0", Scales("uint8", parent=Scales())])
@pytest.mark.parametrize("zero", ["integer", "fp32"])
@pytest.mark.parametrize("divisor", ["stored", "inverse"])
def test_a_range_beyond_that_of_float32(scale, zero, divisor):
    """The scale of one bit is the range itself, which is 6e38 here: it becomes the largest number."""
    for bits, signed in ((1, True), (1, False), (4, True), (8, False)):
        spec = QuantSpec(bits, signed, symmetric=False, scale=scale, zero=zero, divisor=divisor)
        back = quantize(F([3e38, -3e38]), spec).dequantize()
        assert not np.isnan(back).any() and back[0] >= back[1]
        if bits == 1 and scale == "fp32":
            assert np.isfinite(back).all() and abs(back.astype(float) - [3e38, -3e38]).max() <= np.finfo(F).max


LARGEST = np.finfo(F).max
UP_TO_THE_LARGEST = (
    SPECS
    | {
        f"{bits} bits {name}": QuantSpec(bits, granularity=PerGroup(size), **options)
        for bits in (2, 4, 7, 8)
        for size in (5, 32)
        for name, options in {
            "e8m0": {"scale": "e8m0"},
            "bf16": {"scale": "bf16"},
            "half up": {"rounding": "half_up", "divisor": "inverse"},
            "stochastic": {"rounding": "stochastic"},
            "two levels": {"scale": Scales("uint4", PerChannel(0), Scales("fp32"))},
            "zeros": {"symmetric": False},
            "float zeros": {"symmetric": False, "zero": "fp32", "scale": "bf16"},
        }.items()
    }
    | {
        f"{code} {scale}": QuantSpec(8, code=code, scale=scale)
        for code in ("e4m3", "e5m2")
        for scale in ("fp32", "bf16")
    }
)


@pytest.mark.parametrize("name", UP_TO_THE_LARGEST)
def test_finite_numbers_decode_to_finite_numbers(name):
    """The nearest code of a number within half a step of the largest float32 may stand for more than that."""
    spec = UP_TO_THE_LARGEST[name]
    for low in (-LARGEST, -F(2e38), F(0)):
        for high in LARGEST * F([1, 1 - 2.0**-9, 1 - 2.0**-7, 0.97, 0.94, 0.9]):
            x = np.zeros((2, 64), F)
            x[0, 3], x[1, ::7], x[1, 5] = high, high * F(0.99), low
            try:
                q = quantize(x, spec, seed=1)
            except ValueError as error:
                assert "does not fit" in str(error)
                continue
            back, onto = q.dequantize(), q.add_to(-x / 2)
            assert np.isfinite(back).all() and np.isfinite(onto).all()


def test_infinite_codes_stay_infinite():
    """Of e5m2, which has codes for infinity that no number gets."""
    q = quantize(np.full(8, LARGEST), QuantSpec(8, code="e5m2"))
    q.part("codes")[:2] = 0x7C, 0xFC
    assert q.dequantize()[:3].tolist() == [np.inf, -np.inf, LARGEST]


@pytest.mark.parametrize("tiny", [2.0**-126, 2.0**-127])
def test_powers_of_two_down_to_the_smallest(tiny):
    spec = QuantSpec(8, scale="e8m0")
    for given in (None, F(tiny)):
        q = quantize(F([127 * tiny, -tiny]), spec, scales=given)
        assert q.scales() == F(tiny) and q.integers().tolist() == [127, -1]
    assert quantize(F([1.0]), spec, scales=F(tiny * 0.75)).scales() == max(F(tiny), F(2.0**-127))


def test_lists_of_numbers():
    for spec in (INT8, INT4_G32, NF4, ASYMMETRIC):
        q = quantize([1.0, -2.0], spec)
        np.testing.assert_array_equal(q.buffer, quantize(F([1, -2]), spec).buffer)
    assert quantize([[1.0], [2.0]], INT8).shape == (2, 1) and quantize(2.0, INT8).shape == ()
    for wrong in ([1, 2], ["a"], None, [[1.0], [1.0, 2.0]]):
        with pytest.raises((TypeError, ValueError), match=r"floating-point|inhomogeneous"):
            quantize(wrong, INT8)
    with pytest.raises(TypeError, match="expected an array of NumPy or CuPy, found list"):
        kernels.array_namespace([1.0])


@pytest.mark.parametrize("scale", ["fp32", "fp16"])
@pytest.mark.parametrize("zero", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("bits, signed", [(1, True), (2, False), (4, True), (8, False), (8, True)])
def test_floating_zeros_far_from_zero(bits, signed, zero, scale):
    """Each element is within half a step, and the steps are as much wider as the zero points are off."""
    rng, digits = np.random.default_rng(bits), {"fp32": 23, "fp16": 10, "bf16": 7}[zero]
    spec = QuantSpec(bits, signed, False, PerGroup(16), scale=scale, zero=zero)
    for middle in (-1e4, -1, 0, 0.75, 1, 30, 1000):
        for width in (1e-5, 1e-3, 0.1, 0.5, 3):
            x = (middle + rng.uniform(-1, 1, (20, 16)) * width * max(abs(middle), 1)).astype(F)
            q = quantize(x, spec)
            step = np.repeat(q.scales(), 16, axis=1).astype(np.float64)
            assert (abs(q.dequantize() - x.astype(np.float64)) <= 0.51 * step + 2.0**-22 * abs(x)).all()
            span, most = np.ptp(x.astype(np.float64), axis=1), abs(x).max(axis=1)
            widest = (span + most * 2.0**-digits) / (2**bits - 1) / (1 - 2.0**-digits)
            widest = np.maximum(widest, most / 32752 if zero == "fp16" else 0)
            assert (q.scales()[:, 0] <= widest * 1.001 + 2.0**-24).all()


def test_zeros_that_are_none():
    x = np.ones((2, 4), F)
    for zero in ("fp32", "fp16", "bf16"):
        spec = QuantSpec(8, symmetric=False, granularity=PerChannel(0), zero=zero)
        for wrong in (np.nan, np.inf, -np.inf, 1e39, *([1e5] if zero == "fp16" else [])):
            with pytest.raises(ValueError, match=f"zeros: expected finite numbers that fit {zero}, found "):
                quantize(x, spec, scales=F([1, 1]), zeros=np.array([1, wrong]))
    with pytest.raises(TypeError, match="scales: expected real numbers, found complex128"):
        quantize(x, INT8, scales=1j)


def test_an_overflow_of_float64():
    with pytest.raises(ValueError, match="is 1e"):
        quantize(np.array([1.0, 1e300]), INT8)


def test_given_scales():
    x = np.array([[0.4, 1.0, -9.0], [5.0, 100.0, 0.0]], F)
    rows = QuantSpec(8, granularity=PerChannel(0))
    q = quantize(x, rows, scales=F([0.5, 1]))
    np.testing.assert_array_equal(q.integers(), [[1, 2, -18], [5, 100, 0]])
    assert quantize(F([1000, -1000]), INT8, scales=1.0).integers().tolist() == [127, -127]
    np.testing.assert_array_equal(quantize(F([-1, 0, 9]), ASYMMETRIC, scales=0.5, zeros=-3.0).integers(), [-5, -3, 15])
    for scales in ([1, 0], [1, np.nan], [1, np.inf]):
        with pytest.raises(ValueError, match="finite numbers other than 0"):
            quantize(x, rows, scales=F(scales))
    for scale in ("e8m0", Scales("uint8", parent=Scales())):
        with pytest.raises(ValueError, match="have no sign, and -1 is below 0"):
            quantize(x, rows.replace(scale=scale), scales=F([1, -1]))
    with pytest.raises(ValueError, match="scales: expected 2 numbers, one per group, found 3"):
        quantize(x, rows, scales=np.ones(3, F))
    with pytest.raises(ValueError, match="come together"):
        quantize(x, ASYMMETRIC, scales=F(1))
    with pytest.raises(ValueError, match="whole numbers from -128 to 127"):
        quantize(x, ASYMMETRIC, scales=F(1), zeros=F(0.5))
    for symmetric in (INT8, INT4_G32, NF4, QuantSpec(2, code="kmeans")):
        with pytest.raises(ValueError, match="zeros: expected none for symmetric codes"):
            quantize(x, symmetric, zeros=F(3))
    with pytest.raises(ValueError, match="takes no scales"):
        quantize(x, QuantSpec(2, code="kmeans"), scales=F(1))


class TestStochastic:
    SPEC = QuantSpec(8, rounding="stochastic")

    def test_needs_a_seed(self):
        with pytest.raises(ValueError, match="needs a seed"):
            quantize(np.ones(3, F), self.SPEC)

    def test_a_seed_decides(self):
        x = np.random.default_rng(0).standard_normal(1000).astype(F)
        once, again, other = (quantize(x, self.SPEC, seed=seed).buffer for seed in (1, 1, 2))
        assert (once == again).all() and (once != other).any()

    def test_right_on_the_average(self):
        """The mean of n draws is within 5 standard deviations; one draw has at most half a step's."""
        x, n = np.full(1 << 16, 0.3, F), 1 << 16
        back = quantize(x, self.SPEC, scales=F(1), seed=5).dequantize()
        assert set(np.unique(back)) == {0.0, 1.0}
        assert abs(back.mean() - 0.3) < 5 * 0.5 / np.sqrt(n)
        halves = back.reshape(2, -1).mean(axis=1)
        assert abs(halves - 0.3).max() < 5 * 0.5 / np.sqrt(n / 2)
        products = (back[1:] - 0.3) * (back[:-1] - 0.3)  # neighbours know nothing of each other
        assert abs(products.mean()) < 5 * 0.21 / np.sqrt(n)

    def test_floats_too(self):
        x = np.full(1 << 14, 1.03, F)
        spec = QuantSpec(8, code="e4m3", rounding="stochastic")
        back = quantize(x, spec, scales=F(1), seed=5).dequantize()
        assert set(np.unique(back)) == {1.0, 1.125} and back.mean() == pytest.approx(1.03, abs=5 * 0.06 / 128)
