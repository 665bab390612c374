"""What a spec says of sizes, and what it refuses to say."""

import json

import numpy as np
import pytest

from quant import (
    PRESETS,
    PerChannel,
    PerGroup,
    PerTensor,
    QuantizedArray,
    QuantSpec,
    Scales,
    grouped,
    layout,
    parse,
    quantize,
    wire_nbytes,
)

BITS = {
    "INT8": 8,
    "INT4_G32": 4.5,
    "Q4_0": 4.5,
    "Q8_0": 8.5,
    "MXFP8": 8.25,
    "MXFP4": 4.25,
    "NVFP4": 4.5,
    "VSQ": 4.25,
    "NF4": 4.5,
}


@pytest.mark.parametrize("name", PRESETS)
def test_bits_of_presets(name):
    """As stated, and as a long array really takes: what there is once per tensor or row is spread thin."""
    spec = PRESETS[name]
    assert spec.bits_per_element == BITS[name]
    q = quantize(np.ones((1, 1 << 16), np.float32), spec)
    once = 32 * len([level for level in (spec.scales.parent or spec.scales,) if name in ("INT8", "NVFP4", "VSQ")])
    assert 8 * q.nbytes == BITS[name] * q.size + once


@pytest.mark.parametrize(
    ("spec", "shape", "nbytes"),
    [
        (grouped(8, 128, "fp32"), (1000,), 1000 + 8 * 4),
        (grouped(3, 64), (64 * 5,), 24 * 5 + 2 * 5),
        (grouped(3, 7), (10,), 4 + 2 * 2),
        (grouped(5, 16, symmetric=False), (2, 20), 25 + 4 * 2 + 3),
        (grouped(4, 16, symmetric=False, zero="fp16"), (32,), 16 + 4 + 4),
        (QuantSpec(2, granularity=PerChannel(1)), (4, 6), 6 + 6 * 4),
        (QuantSpec(2, code="kmeans"), (4, 4), 4 + 4 * 4),
        (QuantSpec(4, granularity=PerGroup(4), scale=Scales("uint4", PerGroup(2), Scales("fp32"))), (16,), 8 + 2 + 8),
        (grouped(1, 8, q_range="peak"), (9,), 2 + 4),
        (grouped(8, 8), (0,), 0),
        (QuantSpec(8), (), 5),
    ],
)
def test_bytes_are_what_the_layout_says(spec, shape, nbytes):
    q = quantize(np.ones(shape, np.float32), spec)
    assert q.nbytes == q.buffer.nbytes == wire_nbytes(spec, shape) == nbytes
    assert q.bits_per_element * q.size == 8 * nbytes or not q.size
    parts = sorted(layout(spec, shape).parts, key=lambda part: part.start)
    assert [part.start for part in parts] == list(np.cumsum([0] + [part.nbytes for part in parts[:-1]]))
    assert all(part.start % part.dtype.itemsize == 0 for part in parts)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"bits": 0}, "bits: expected one of 1, 2"),
        ({"bits": 9}, "found 9"),
        ({"bits": 8, "code": "int8"}, "code: expected one of linear"),
        ({"bits": 8, "code": "nf4"}, "bits: expected 4 for nf4, found 8"),
        ({"bits": 4, "code": "nf4", "symmetric": False}, "are for linear codes"),
        ({"bits": 4, "code": "nf4", "rounding": "stochastic"}, "nf4 has no rounding"),
        ({"bits": 8, "code": "e4m3", "rounding": "half_up"}, "e4m3 has no rounding"),
        ({"bits": 8, "q_range": "wide"}, "q_range: expected one of restricted"),
        ({"bits": 1}, "one bit with a sign"),
        ({"bits": 4, "q_range": "peak", "symmetric": False}, "q_range='peak' is for symmetric"),
        ({"bits": 4, "q_range": "peak", "scale": "e8m0"}, "which e8m0 does not have"),
        ({"bits": 8, "rounding": "up"}, "rounding: expected one of"),
        ({"bits": 8, "scale": "uint4"}, "need a parent"),
        ({"bits": 8, "scale": "float"}, "format of scales: expected one of"),
        ({"bits": 4, "code": "nf4", "scale": "float"}, "format of scales: expected one of"),
        ({"bits": 8, "zero": "int"}, "zero: expected one of"),
        ({"bits": 8, "divisor": "none"}, "divisor: expected one of"),
        ({"bits": 8, "granularity": "row"}, "granularity: expected PerTensor"),
        ({"bits": 2, "code": "kmeans", "scale": "e4m3"}, "the levels of kmeans"),
    ],
)
def test_what_does_not_go_together(arguments, says):
    with pytest.raises(ValueError, match=says):
        QuantSpec(**arguments)


def test_parents_are_for_small_scales():
    with pytest.raises(ValueError, match="small integers or e4m3"):
        Scales("fp16", parent=Scales("fp32"))


def test_groups_have_elements():
    with pytest.raises(ValueError, match="at least one element"):
        PerGroup(0)


@pytest.mark.parametrize("granularity", [PerChannel(2), PerGroup(4, 2), PerGroup(4, -3)])
def test_axes_exist(granularity):
    with pytest.raises(ValueError, match="has no axis"):
        quantize(np.ones((2, 2), np.float32), QuantSpec(8, granularity=granularity))


@pytest.mark.parametrize("name", PRESETS)
def test_plain_values_and_back(name):
    spec = PRESETS[name]
    assert QuantSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16])
def test_integers_of_numpy(kind):
    """They are kept as Python's, so that specs go into JSON, and shapes into layouts."""
    spec = QuantSpec(kind(4), np.True_, np.False_, PerGroup(kind(32), kind(0)))
    assert spec == QuantSpec(4, True, False, PerGroup(32, 0))
    assert QuantSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert json.dumps(PerChannel(kind(1)).axis) == "1"
    assert wire_nbytes(QuantSpec(8), kind(7)) == wire_nbytes(QuantSpec(8), (kind(7),)) == 11
    assert type(layout(QuantSpec(8), [kind(7), 2]).nbytes) is int
    q = QuantizedArray(QuantSpec(8), kind(7))
    assert q.shape == (7,) and type(q.shape[0]) is int
    for wrong in (2.5, (2.5,), "3", True, (3, None), np.float64(2)):
        for use in (wire_nbytes, layout, QuantizedArray):
            with pytest.raises(ValueError, match="shape: expected a whole number, found"):
                use(QuantSpec(8), wrong)
    with pytest.raises(ValueError, match=r"seed: expected a whole number, found 1\.5"):
        quantize(np.ones(3, np.float32), QuantSpec(8, rounding="stochastic"), seed=1.5)


def test_equal_specs():
    """What means the same compares the same, and has the same hash."""
    for one, other in (
        (QuantSpec(8), QuantSpec(8, scale=Scales("fp32"))),
        (QuantSpec(8, scale="fp16"), QuantSpec(8, scale=Scales("fp16", PerChannel(0)))),
        (
            QuantSpec(4, scale=Scales("uint4", PerChannel(-2), Scales("fp32", PerGroup(4)))),
            QuantSpec(4, scale=Scales("uint4", PerChannel(0), Scales())),
        ),
        (
            QuantSpec(4, scale=Scales("uint4", PerGroup(4, 1), Scales())),
            QuantSpec(4, scale=Scales("uint4", PerGroup(4), Scales())),
        ),
    ):
        assert one == other and hash(one) == hash(other) and one.to_dict() == other.to_dict()
    x = np.ones((3, 8), np.float32)
    for one, other in ((PerGroup(4), PerGroup(4, 1)), (PerChannel(-2), PerChannel(0)), (PerChannel(1), PerChannel(-1))):
        q = quantize(x, QuantSpec(8, granularity=one))
        assert quantize(x, QuantSpec(8, granularity=other), out=q) is q
    with pytest.raises(ValueError, match="out: expected"):
        quantize(x, QuantSpec(8, granularity=PerChannel(0)), out=q)
    with pytest.raises(ValueError, match="has no axis 2"):
        Scales("uint4", PerChannel(2), Scales())


def test_names():
    assert parse("q4_0") == PRESETS["Q4_0"]
    assert parse("int8") == QuantSpec(8)
    assert parse("int3_g64") == grouped(3, 64)
    assert parse("int4_row") == QuantSpec(4, granularity=PerChannel(0))
    assert parse("INT4_G32_zero") == grouped(4, 32, symmetric=False)
    assert parse("int8_zero") == QuantSpec(8, symmetric=False)
    assert QuantSpec(8).granularity == PerTensor()
    with pytest.raises(ValueError, match="no spec 'int9'"):
        parse("int9")
