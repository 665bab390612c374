"""Codes are those of the libraries that people know, bit for bit."""

import ml_dtypes
import numpy as np
import pytest

from quant import MXFP4, MXFP8, Q4_0, Q8_0, PerChannel, PerGroup, PerTensor, QuantSpec, grouped, kernels, quantize
from quant.formats import MINIFLOATS, values
from quant.io import ggml_blocks
from quant.kernels import minifloat_bits
from quant.scaling import scales

F = np.float32
RNG = np.random.default_rng(5)


@pytest.fixture(params=["reference", "compiled"], autouse=True)
def form(request):
    if request.param == "compiled":
        pytest.importorskip("quant.kernels._codecs")
    with kernels.forms(*([] if request.param == "reference" else [request.param])):
        yield request.param


def sample(*shape, scale=1.0):
    """Numbers of many sizes, halves among them, which show how ties are rounded."""
    x = (RNG.standard_normal(shape) * scale).astype(F)
    x.reshape(-1)[::7] = np.rint(x.reshape(-1)[::7] * 4) / 2
    return x


# ------------------------------------------------------------------------------------------ ONNX

GRANULARITIES = {
    "tensor": (PerTensor(), None, None),
    "rows": (PerChannel(0), 0, None),
    "columns": (PerChannel(1), 1, None),
    "blocks": (PerGroup(16), 1, 16),
    "blocks down": (PerGroup(8, 0), 0, 8),
}


def _onnx(operator, onnx_type, attributes, arrays, output):
    onnx = pytest.importorskip("onnx")
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    names = [f"i{number}" for number in range(len(arrays))]
    node = helper.make_node(operator, names, ["o"], **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, arrays)
    ]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("o", onnx_type or output, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    del onnx
    return ReferenceEvaluator(model).run(None, dict(zip(names, arrays)))[0]


def test_no_tables_of_longer_formats():
    for code in ("fp16", "bf16"):
        with pytest.raises(ValueError, match=f"code: expected a format of at most 8 bits, found {code} of 16"):
            values(code)


@pytest.mark.parametrize("where", GRANULARITIES)
@pytest.mark.parametrize("kind", ["int8", "uint8", "int4", "uint4", "int2"])
@pytest.mark.parametrize("with_zeros", [False, True], ids=["symmetric", "zeros"])
def test_onnx(where, kind, with_zeros):
    pytest.importorskip("onnx")
    from onnx import TensorProto

    granularity, axis, block = GRANULARITIES[where]
    bits, signed = int(kind[-1]), kind.startswith("i")
    x = sample(24, 64, scale=3)
    spec = QuantSpec(bits, signed, not with_zeros, granularity, q_range="full")
    if not with_zeros and not signed:
        x = abs(x)
    own = quantize(x, spec)
    scales, zeros = own.scales(), own.zeros()
    shape = {"tensor": (), "rows": (24,), "columns": (64,), "blocks": (24, 4), "blocks down": (64, 3)}[where]
    theirs = scales.reshape(shape) if where != "blocks down" else scales.reshape(shape).T
    small = np.dtype(kind) if bits == 8 else np.dtype(getattr(ml_dtypes, kind))
    arrays = [x, np.ascontiguousarray(theirs)]
    if with_zeros:
        points = zeros.reshape(shape) if where != "blocks down" else zeros.reshape(shape).T
        arrays.append(np.ascontiguousarray(points).astype(np.int8 if signed else np.uint8).astype(small))
    attributes = {} if axis is None else {"axis": axis}
    attributes |= {} if block is None else {"block_size": block}
    tensor_type = getattr(TensorProto, kind.upper())
    if not with_zeros:
        attributes["output_dtype"] = tensor_type
    codes = _onnx("QuantizeLinear", tensor_type, attributes, arrays, None)
    np.testing.assert_array_equal(codes.astype(np.int32), own.integers().astype(np.int32))
    given = {"scales": scales} | ({"zeros": zeros} if with_zeros else {})
    assert quantize(x, spec, **given).buffer.tobytes() == own.buffer.tobytes()
    attributes.pop("output_dtype", None)
    back = _onnx("DequantizeLinear", None, attributes, [codes.astype(small), *arrays[1:]], TensorProto.FLOAT)
    np.testing.assert_array_equal(back, own.dequantize())


def test_onnx_chooses_the_same_scale():
    pytest.importorskip("onnx")
    from onnx.reference.ops.op_dynamic_quantize_linear import DynamicQuantizeLinear

    for shift in (0, 5, -5):
        x = sample(1000) + F(shift)
        codes, scale, zero = DynamicQuantizeLinear._run(None, x)
        own = quantize(x, QuantSpec(8, signed=False, symmetric=False))
        assert (own.scales().item(), own.zeros().item()) == (scale.item(), zero.item())
        np.testing.assert_array_equal(own.integers(), codes)


# ------------------------------------------------------------------------------------------ ggml


@pytest.mark.parametrize("spec", [Q4_0, Q8_0], ids=["Q4_0", "Q8_0"])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6, 100.0])
def test_ggml(spec, scale):
    gguf = pytest.importorskip("gguf")
    kind = "Q4_0" if spec is Q4_0 else "Q8_0"
    x = sample(33, 96, scale=scale)
    x[3], x[5, :32] = 0, -1
    x[7, :64] = np.tile([2, -2], 32)  # of equal sizes the first one decides the sign of the scale
    theirs = gguf.quantize(x, getattr(gguf.GGMLQuantizationType, kind))
    own = quantize(x, spec)
    np.testing.assert_array_equal(ggml_blocks.to_blocks(own), theirs)
    back = gguf.dequantize(theirs, getattr(gguf.GGMLQuantizationType, kind))
    np.testing.assert_array_equal(own.dequantize(), back)
    np.testing.assert_array_equal(ggml_blocks.from_blocks(theirs, kind).dequantize(), back)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0,), (2, 0, 32)])
def test_blocks_of_nothing(shape):
    blocks = ggml_blocks.to_blocks(quantize(np.zeros(shape, F), Q4_0))
    assert blocks.shape == (*shape[:-1], shape[-1] // 32 * 18)
    assert ggml_blocks.from_blocks(blocks, "Q4_0").shape == shape


def test_what_is_no_block():
    with pytest.raises(ValueError, match="spec: expected one of Q4_0, Q8_0"):
        ggml_blocks.to_blocks(quantize(np.ones(32, F), QuantSpec(8)))
    with pytest.raises(ValueError, match="rows of 33 elements"):
        ggml_blocks.to_blocks(quantize(np.ones(33, F), Q4_0))
    with pytest.raises(ValueError, match="multiples of 18"):
        ggml_blocks.from_blocks(np.zeros(17, np.uint8), "Q4_0")
    with pytest.raises(ValueError, match="Q4_0 or Q8_0, found 'Q4_1'"):
        ggml_blocks.from_blocks(np.zeros(18, np.uint8), "Q4_1")


# ------------------------------------------------------------------------------------------ ml_dtypes

SMALL = [name for name, kind in MINIFLOATS.items() if kind.bits <= 8]


@pytest.mark.parametrize("code", SMALL)
def test_every_value(code):
    """All 256, 64 or 16 values, and what lies between: on the middle, and right beside it."""
    kind = MINIFLOATS[code]
    every = values(code)
    theirs = np.arange(2**kind.bits, dtype=np.uint8).view(kind.dtype).astype(F)
    np.testing.assert_array_equal(every, theirs)
    finite = np.unique(every[np.isfinite(every)])
    middles = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate(
        [finite, middles, np.nextafter(middles, F(np.inf)), np.nextafter(middles, F(-np.inf)), F([-0.0])]
    )
    np.testing.assert_array_equal(minifloat_bits(x, code), x.astype(kind.dtype).view(np.uint8))
    beyond = F([1e9, -1e9, kind.largest * 1.01])
    np.testing.assert_array_equal(
        minifloat_bits(beyond, code), np.clip(beyond, -kind.largest, kind.largest).astype(kind.dtype).view(np.uint8)
    )


@pytest.mark.parametrize("code", SMALL)
def test_codes_of_floats(code):
    """What `quantize` makes is a cast of x / S; clipped, which a cast is not."""
    kind = MINIFLOATS[code]
    x = sample(8, 64, scale=20)
    x[0, 0], x[1, 1] = 1e6, -1e-6
    q = quantize(x, QuantSpec(kind.bits, code=code, granularity=PerChannel(0)))
    units = np.clip(x / q.scales(), -kind.largest, kind.largest)
    np.testing.assert_array_equal(q.integers(), units.astype(kind.dtype).view(np.uint8))
    np.testing.assert_array_equal(q.dequantize(), units.astype(kind.dtype).astype(F) * q.scales())


@pytest.mark.parametrize("spec", [MXFP8, MXFP4], ids=["MXFP8", "MXFP4"])
def test_shared_exponents(spec):
    """The power of two of OCP's MX: floor(log2 of the largest), less the largest exponent of an element."""
    x = sample(64, 32) * np.ldexp(F(1), RNG.integers(-40, 40, (64, 1))).astype(F)
    q = quantize(x, spec)
    largest = abs(x).max(axis=1).astype(np.float64)
    expected = np.floor(np.log2(largest)) - MINIFLOATS[spec.code].highest
    np.testing.assert_array_equal(q.part("scale0"), expected + 127)
    np.testing.assert_array_equal(q.part("scale0").view(ml_dtypes.float8_e8m0fnu).astype(F), q.scales().reshape(-1))


# ------------------------------------------------------------------------------------------ PyTorch


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("signed", [True, False])
def test_torch(bits, signed):
    torch = pytest.importorskip("torch")
    x = sample(16, 50)
    spec = QuantSpec(bits, signed, symmetric=False, divisor="inverse")
    q = quantize(x, spec)
    fake = torch.fake_quantize_per_tensor_affine(
        torch.from_numpy(x), q.scales().item(), int(q.zeros().item()), spec.q_min, spec.q_max
    )
    np.testing.assert_array_equal(q.dequantize(), fake.numpy())
    rows = spec.replace(granularity=PerChannel(0), symmetric=True, signed=True, q_range="full")
    q = quantize(x, rows)
    fake = torch.fake_quantize_per_channel_affine(
        torch.from_numpy(x),
        torch.from_numpy(q.scales().reshape(-1)),
        torch.zeros(16, dtype=torch.int32),
        0,
        rows.q_min,
        rows.q_max,
    )
    np.testing.assert_array_equal(q.dequantize(), fake.numpy())


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("form, kind", [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16), ("e4m3", "float8_e4m3fn")])
def test_scales_are_rounded_as_everywhere(form, kind, signed):
    """To the nearest; away from 0 below the normal numbers, where the nearest may be half as large."""
    kind = np.dtype(getattr(ml_dtypes, kind)) if isinstance(kind, str) else np.dtype(kind)
    tiny = F(ml_dtypes.finfo(kind).smallest_normal)
    x = (tiny * np.exp(RNG.uniform(-12, 12 if form != "e4m3" else 8, 3000))).astype(F) * F(-1 if signed else 1)
    found = scales.round_to(x, form)[1]
    normal = abs(x) >= tiny
    nearest = x.astype(kind).astype(F)
    np.testing.assert_array_equal(found[normal], nearest[normal])
    step = F(ml_dtypes.finfo(kind).smallest_subnormal)
    np.testing.assert_array_equal(found[~normal], np.copysign(np.ceil(abs(x[~normal]) / step) * step, x[~normal]))
    np.testing.assert_array_equal(scales.round_to(x, form, up=False)[1], nearest)


@pytest.mark.parametrize("form", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_no_scale_clips_the_largest_element(form, bits):
    """Groups from denormal scales up: all elements within half a step, but for the digits of a normal scale."""
    tiny = {"fp16": 2.0**-14, "bf16": 2.0**-126, "fp32": 2.0**-126}[form]
    x = (RNG.standard_normal((200, 32)) * tiny * np.exp(RNG.uniform(-8, 6, (200, 1)))).astype(F)
    q = quantize(x, grouped(bits, 32, form))
    steps = abs(q.dequantize().astype(np.float64) - x) / q.scales()
    assert steps.max() <= 0.5 + (2 ** (bits - 1) * 2.0**-8 if form == "bf16" else 2**-4) and (q.scales() > 0).all()
