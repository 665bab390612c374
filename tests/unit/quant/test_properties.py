"""What holds for all numbers: errors within half a step, packing that loses nothing, forms that agree."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from quant import Q4_0, Q8_0, PerChannel, PerGroup, PerTensor, QuantSpec, Scales, kernels, quantize
from quant.formats import MINIFLOATS
from quant.layout import packed_nbytes
from quant.spec.granularity import to_rows

F = np.float32
often = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

counts = st.integers(0, 200)
widths = st.integers(1, 7)
granularities = st.sampled_from(
    [PerTensor(), PerChannel(0), PerChannel(1), PerGroup(1), PerGroup(5), PerGroup(32), PerGroup(64), PerGroup(3, 0)]
)
plain = (
    st.floats(-(2.0**100), 2.0**100, width=32)
    | st.floats(-2, 2, width=32)
    | st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-130), 0.5])
)


@st.composite
def arrays(draw):
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 70)))
    scale = draw(st.sampled_from([1.0, 1e-3, 1e-30, 1e20]))
    seed = draw(st.integers(0, 2**32 - 1))
    x = (np.random.default_rng(seed).standard_normal(shape) * scale).astype(F)
    for value in draw(st.lists(plain, max_size=5)):
        x[draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1))] = value
    return x


@st.composite
def linear(draw):
    bits = draw(st.integers(1, 8))
    symmetric = draw(st.booleans())
    signed = draw(st.booleans()) if bits > 1 or not symmetric else False
    return QuantSpec(
        bits,
        signed,
        symmetric,
        draw(granularities),
        q_range=draw(st.sampled_from(["restricted", "full", "centred"])) if symmetric and signed else "restricted",
        rounding=draw(st.sampled_from(["nearest_even", "half_away", "half_up", "stochastic"])),
        scale=draw(st.sampled_from(["fp32", "bf16", "e8m0", Scales("uint8", parent=Scales("fp32"))])),
    )


def per_element(q, numbers):
    """One number per group, for every element, in the array's shape."""
    from quant.scaling.scales import spread
    from quant.spec.granularity import from_rows

    return from_rows(spread(numbers, q.layout.blocks), q.spec.granularity, q.shape)


@often
@given(arrays(), linear())
def test_error_is_half_a_step(x, spec):
    """Where nothing clips; a whole step when rounded stochastically."""
    q = quantize(x, spec, seed=1)
    scale = per_element(q, q.scales()).astype(np.float64)
    zero = 0 if q.zeros() is None else per_element(q, q.zeros()).astype(np.float64)
    inside = (x >= scale * (spec.q_min - zero)) & (x <= scale * (spec.q_max - zero))
    error = abs(q.dequantize().astype(np.float64) - x)
    allowed = scale * (1 if spec.rounding == "stochastic" else 0.5)
    rounding = 2**-22 * abs(x).astype(np.float64) + 2e-45 + scale * 2**-16
    assert (error <= allowed + rounding)[inside].all()
    np.testing.assert_array_less(error - rounding, np.maximum(allowed, abs(x) + allowed) + 1e-45)


@often
@given(arrays(), st.sampled_from([name for name, kind in MINIFLOATS.items() if kind.bits <= 8]), granularities)
def test_floats_are_as_near_as_their_digits(x, code, granularity):
    kind = MINIFLOATS[code]
    q = quantize(x, QuantSpec(kind.bits, code=code, granularity=granularity))
    scale = per_element(q, q.scales()).astype(np.float64)
    relative, smallest = 2.0 ** -(kind.mantissa + 1), 2.0 ** (kind.lowest - kind.mantissa)
    error = abs(q.dequantize().astype(np.float64) - x)
    size = abs(x).astype(np.float64)
    allowed = np.maximum(relative * size, scale * smallest / 2) * (1 + 1e-5) + 1e-44 + size * (scale < 1e-36)
    assert (error <= allowed).all()


@often
@given(arrays(), linear())
def test_forms_agree(x, spec):
    pytest.importorskip("quant.kernels._codecs")
    fast = quantize(x, spec, seed=2)
    back, onto = fast.dequantize(), fast.add_to(x.copy())
    with kernels.forms():
        slow = quantize(x, spec, seed=2)
        assert slow.buffer.tobytes() == fast.buffer.tobytes()
        assert slow.dequantize().tobytes() == back.tobytes() and slow.add_to(x.copy()).tobytes() == onto.tobytes()


def outcome(x, spec):
    """Bytes, or what is wrong."""
    try:
        return quantize(x, spec).buffer.tobytes()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "spec", [Q4_0, Q8_0, replace(Q4_0, divisor="stored"), replace(Q8_0, q_range="peak", scale="fp32")]
)
@often
@given(x=arrays())
def test_forms_agree_on_signs_and_inverses_of_scales(x, spec):
    pytest.importorskip("quant.kernels._codecs")
    fast = outcome(x, spec)
    with kernels.forms():
        assert outcome(x, spec) == fast


@pytest.mark.parametrize("spec", [Q4_0, replace(Q4_0, divisor="stored"), replace(Q4_0, divisor="stored", scale="bf16")])
@pytest.mark.parametrize("size", [0.0, 2**-149, 1e-38, 1e-8, 1.0])
def test_a_scale_keeps_its_sign(spec, size):
    x = np.array([[size], [-size]], np.float32) * np.ones((2, 32), np.float32)
    found = []
    for form in ((), ("compiled",)):
        with kernels.forms(*form):
            found.append(quantize(x, spec))
    assert found[0].buffer.tobytes() == found[1].buffer.tobytes()
    assert (found[0].part("scale0") >> 15).tolist() == [1, 0]  # the farthest is code -8


@pytest.mark.parametrize("form", ["reference", "compiled"])
@often
@given(count=counts, bits=widths, seed=st.integers(0, 99))
def test_packing_loses_nothing(form, count, bits, seed):
    if form == "compiled":
        pytest.importorskip("quant.kernels._codecs")
    codes = np.random.default_rng(seed).integers(0, 2**bits, count).astype(np.uint8)
    with kernels.forms(*([form] if form == "compiled" else [])):
        packed = np.full(packed_nbytes(count, bits), 0xA5, np.uint8)
        kernels.pack(codes, bits, packed)
        back = np.full(count, 0xA5, np.uint8)
        kernels.unpack(packed, bits, back)
    np.testing.assert_array_equal(back, codes)
    with kernels.forms():
        again = np.zeros_like(packed)
        kernels.pack(codes, bits, again)
    np.testing.assert_array_equal(again, packed)


@pytest.mark.parametrize("bits", range(1, 8))
def test_every_bit_counts(bits):
    """Codes that differ give bytes that differ, and no bit is wasted but in the last byte."""
    for count in (1, 7, 31, 32, 33, 64, 100):
        packed = np.zeros(packed_nbytes(count, bits), np.uint8)
        kernels.pack(np.full(count, 2**bits - 1, np.uint8), bits, packed)
        assert int(np.unpackbits(packed).sum()) == count * bits


def test_planes_of_nibbles():
    """Byte j of a block holds code j below and code j + 16 above."""
    codes = np.arange(32, dtype=np.uint8) % 16
    packed = np.zeros(16, np.uint8)
    kernels.pack(codes, 4, packed)
    np.testing.assert_array_equal(packed, np.arange(16) | np.arange(16) << 4)


parents = st.sampled_from([PerTensor(), PerChannel(0), PerGroup(2), PerGroup(3), PerGroup(8), PerGroup(50)])


@st.composite
def shared(draw):
    """Specs whose scales have parents, in groups of any size."""
    kind = draw(st.sampled_from(["linear", "zeros", "e2m1", "nf4"]))
    scale = Scales(draw(st.sampled_from(["fp32", "bf16"])))
    for form in draw(st.lists(st.sampled_from(["uint4", "e4m3"]), max_size=2)):
        scale = Scales(form, draw(parents), scale)
    options = {"symmetric": False} if kind == "zeros" else {}
    code = "linear" if kind == "zeros" else kind
    return QuantSpec(4, granularity=draw(granularities), code=code, scale=scale, **options)


def runs(labels):
    return [len(list(run)) for _, run in itertools.groupby(labels)]


def alike(lengths):
    return all(n == lengths[0] for n in lengths[1:-1]) and (not lengths or lengths[-1] <= lengths[0])


def labels_of(blocks):
    """The group of every element, in the order of the lines."""
    return [
        line * blocks.per_row + i // blocks.size
        for line, i in itertools.product(range(blocks.rows), range(blocks.length))
    ]


@often
@given(st.tuples(st.integers(1, 4), st.integers(1, 70)), st.integers(0, 2**32 - 1), shared(), st.data())
def test_slices_are_slices_of_the_numbers(shape, seed, spec, data):
    """Refused only where groups of one length, the last of which may be shorter, cannot express the slice."""
    x = np.random.default_rng(seed).standard_normal(shape) * 10.0 ** np.arange(shape[0])[:, None]
    try:
        q = quantize(x, spec)
    except ValueError as error:  # the outer level of two may be rounded down too far for the inner
        assert "does not fit e4m3" in str(error)
        reject()
    blocks = q.layout.blocks
    start, stop = sorted(data.draw(st.tuples(st.integers(0, q.groups), st.integers(0, q.groups))))
    labels = labels_of(blocks)
    chosen = [start <= label < stop for label in labels]
    expressible = alike(runs(itertools.compress(labels, chosen)))
    low, high = start, stop
    for above in q.layout.parent_levels:
        inner = labels_of(above)[low:high]
        expressible = expressible and alike(runs(inner))
        low, high = (inner[0], inner[-1] + 1) if inner else (0, 0)
    if not expressible:
        with pytest.raises(ValueError, match=r"and not the last of them|that share a larger scale"):
            q.slice(start, stop)
        return
    flat = to_rows(q.dequantize(), spec.granularity).reshape(-1)
    assert q.slice(start, stop).dequantize().tobytes() == flat[chosen].tobytes()
