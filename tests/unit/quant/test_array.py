"""Buffers, parts, slices and files of quantised arrays; what goes in comes out, whatever shape and place it has."""

import os
import shutil

import ml_dtypes
import numpy as np
import pytest

from quant import (
    INT4_G32,
    INT8,
    NF4,
    NVFP4,
    PRESETS,
    VSQ,
    PerChannel,
    PerGroup,
    PerTensor,
    QuantizedArray,
    QuantSpec,
    Scales,
    grouped,
    kernels,
    quantize,
    wire_nbytes,
)
from quant.io import safetensors_file

F = np.float32
RNG = np.random.default_rng(1)
SPECS = PRESETS | {
    "three bits": grouped(3, 20),
    "zeros": grouped(5, 32, symmetric=False),
    "float zeros": grouped(4, 32, symmetric=False, zero="fp16"),
    "columns": QuantSpec(6, granularity=PerChannel(1)),
    "down": QuantSpec(4, granularity=PerGroup(3, 0), scale="bf16"),
    "kmeans": QuantSpec(2, code="kmeans", granularity=PerChannel(0), scale="fp16"),
    "three levels": QuantSpec(
        4, granularity=PerGroup(4), scale=Scales("uint4", PerGroup(2), Scales("e4m3", parent=Scales()))
    ),
    "stochastic": grouped(8, 16, rounding="stochastic"),
}
SHAPES = [(), (0,), (1,), (31,), (7, 96), (3, 101), (2, 3, 40), (0, 5), (5, 0)]


def fits(spec, shape):
    axis = getattr(spec.granularity, "axis", None)
    return axis is None or -len(shape) <= axis < len(shape)


CASES = [(name, shape) for name, spec in SPECS.items() for shape in SHAPES if fits(spec, shape)]


def numbers(shape, scale=1.0):
    return (RNG.standard_normal(shape) * scale).astype(F)


def same(one, other):
    return one.tobytes() == other.tobytes() and one.shape == other.shape and one.dtype == other.dtype


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_over_the_wire(name, shape):
    spec, x = SPECS[name], numbers(shape)
    q = quantize(x, spec, seed=1)
    wire = q.to_wire()
    assert wire.dtype == np.uint8 and wire.shape == (wire_nbytes(spec, shape),) and wire.flags.c_contiguous
    there = QuantizedArray.from_wire(wire.copy(), spec, shape)
    back = q.dequantize()
    assert back.shape == x.shape and back.dtype == F
    assert same(there.dequantize(), back)
    largest = np.abs(x).max() if x.size else 0
    assert (abs(back - x) <= largest).all()
    # Wherever in a message it lies, aligned or not.
    message = np.zeros(len(wire) + 3, np.uint8)
    message[3:] = wire
    assert same(QuantizedArray.from_wire(message[3:], spec, shape).dequantize(), back)
    there = QuantizedArray.from_wire(message[3:], spec, shape)
    assert same(quantize(x, spec, seed=1, out=there).buffer, wire)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_form_gives_the_same_bits(name, shape, gpu):
    from support.standin import cupy

    spec, x = SPECS[name], numbers(shape)
    with kernels.forms():
        q = quantize(x, spec, seed=7)
        back, onto = q.dequantize(), q.add_to(np.full(shape, 0.1, F))
    if kernels.available("compiled"):
        fast = quantize(x, spec, seed=7)
        assert same(fast.buffer, q.buffer) and same(fast.dequantize(), back)
        assert same(fast.add_to(np.full(shape, 0.1, F)), onto)
    for form in ("reference", "device") if shutil.which("g++") else ("reference",):
        with kernels.forms(form):
            there = quantize(cupy.asarray(x), spec, seed=7)
            assert same(there.buffer.get(), q.buffer) and same(there.dequantize().get(), back)
            target = cupy.asarray(np.full(shape, 0.1, F))
            there.add_to(target)
            assert same(target.get(), onto)


@pytest.mark.parametrize("name", SPECS)
def test_out(name):
    spec, x = SPECS[name], numbers((6, 64))
    q = quantize(x, spec, seed=1)
    back = q.dequantize()
    for dtype in (np.float64, np.float16, ml_dtypes.bfloat16):
        out = np.zeros(x.shape, dtype)
        assert q.dequantize(out=out) is out
        assert same(out, back.astype(dtype))
        assert same(q.dequantize(dtype=dtype), out)
    turned = np.zeros((64, 6), F).T
    q.dequantize(out=turned)
    np.testing.assert_array_equal(turned, back)
    ones = np.ones((64, 6), F).T
    q.add_to(ones)
    np.testing.assert_array_equal(ones, back + F(1))
    wide = np.full(x.shape, 1e9 + 1)
    assert q.add_to(wide) is wide and same(wide, 1e9 + 1 + back.astype(np.float64))
    for dtype in (np.int8, np.int64, np.complex64, bool, ml_dtypes.float8_e4m3fn):
        for call in (q.add_to, lambda out: q.dequantize(out), lambda out: q.dequantize(dtype=out.dtype)):
            with pytest.raises(TypeError, match="expected floating-point numbers, found"):
                call(np.zeros(x.shape, dtype))
    for dtype in (F, np.float64, np.float16):
        kept = np.ones(x.shape, dtype)
        kept.flags.writeable = False
        for call in (q.add_to, q.dequantize):
            with pytest.raises(ValueError, match="out: expected a writable array"):
                call(kept)
    for out in (np.zeros((64, 6)), np.zeros((64, 6), F)):
        with pytest.raises(ValueError, match=r"out: expected shape \(6, 64\), found \(64, 6\)"):
            q.add_to(out)
    with pytest.raises(ValueError, match=r"out: expected shape \(6, 64\), found \(64, 6\)"):
        q.dequantize(out=np.zeros((64, 6), F))


@pytest.mark.parametrize("forms", [(), ("compiled",)])
@pytest.mark.parametrize("name", SPECS)
def test_a_buffer_that_cannot_be_written(name, forms):
    """As of a received message: it is decoded, and refused as a destination."""
    if forms:
        pytest.importorskip("quant.kernels._codecs")
    spec, x = SPECS[name], numbers((6, 64))
    with kernels.forms(*forms):
        q = quantize(x, spec, seed=1)
        there = QuantizedArray.from_wire(np.frombuffer(q.buffer.tobytes(), np.uint8), spec, x.shape)
        assert same(there.dequantize(), q.dequantize())
        assert same(there.add_to(x.copy()), q.add_to(x.copy()))
        with pytest.raises(ValueError, match="out: expected a writable buffer"):
            quantize(x, spec, seed=1, out=there)


def test_any_place_and_type():
    x = numbers((12, 64))
    expected = quantize(x, INT4_G32).buffer
    for other in (x.T.copy().T, np.repeat(x, 2, axis=1)[:, ::2], x.astype(np.float64)):
        assert same(quantize(other, INT4_G32).buffer, expected)
    x.flags.writeable = False
    assert same(quantize(x, INT4_G32).buffer, expected)
    for half in (np.float16, ml_dtypes.bfloat16):
        assert same(quantize(x.astype(half), INT4_G32).buffer, quantize(x.astype(half).astype(F), INT4_G32).buffer)
    with pytest.raises(TypeError, match="x: expected floating-point numbers, found int64"):
        quantize(np.ones(3, np.int64), INT8)


def test_out_of_another_kind():
    q = quantize(numbers((6, 64)), INT8)
    with pytest.raises(ValueError, match="out: expected"):
        quantize(numbers((6, 64)), INT4_G32, out=q)
    with pytest.raises(ValueError, match="out: expected"):
        quantize(numbers((64, 6)), INT8, out=q)
    with pytest.raises(ValueError, match="expected 388 contiguous uint8"):
        QuantizedArray(INT8, (6, 64), np.zeros(387, np.uint8))
    with pytest.raises(ValueError, match="expected 388 contiguous uint8"):
        QuantizedArray(INT8, (6, 64), np.zeros(388, np.int8))
    with pytest.raises(KeyError, match="no zeros"):
        q.part("zeros")
    with pytest.raises(ValueError, match="no table"):
        q.levels()
    assert (QuantizedArray(INT8, (3,)).dequantize() == 0).all()


@pytest.mark.parametrize("name", ["INT8", "INT4_G32", "Q4_0", "NVFP4", "VSQ", "NF4", "three bits", "zeros", "kmeans"])
def test_slices(name):
    spec = SPECS[name]
    q = quantize(numbers((4, 640)), spec)
    size = q.layout.blocks.size
    flat = q.dequantize().reshape(-1)
    for start, stop in ((0, q.groups), (0, 0), (1, 1), (0, 1), (1, 3), (q.groups - 1, q.groups)):
        if stop > q.groups:
            continue
        part = q.slice(start, stop)
        assert same(part.dequantize(), flat[start * size : stop * size]), (start, stop)
    with pytest.raises(ValueError, match="groups 1 to 99999"):
        q.slice(1, 99999)


def test_slices_through_what_is_shared():
    q = quantize(numbers((3, 64)), VSQ)  # 4 groups to a row
    assert same(q.slice(4, 12).dequantize(), q.dequantize()[1:].reshape(-1))
    with pytest.raises(ValueError, match="cut through groups of 4"):
        q.slice(3, 6)
    ragged = quantize(numbers((3, 40)), grouped(4, 16))
    assert same(ragged.slice(1, 3).dequantize(), ragged.dequantize()[0, 16:])
    with pytest.raises(ValueError, match="shorter than 16, and not the last"):
        ragged.slice(2, 4)


def test_slices_of_scales_that_share_less_than_a_whole_group():
    """Groups of 8 scales, of which a line has 4 only: each line's have a larger scale of their own."""
    x = (np.linspace(0.5, 1, 64, dtype=F) * F([[1], [10], [100], [1000]])).astype(F)
    spec = QuantSpec(4, granularity=PerGroup(16), scale=Scales("uint4", PerGroup(8), Scales("fp32")))
    q = quantize(x, spec)
    flat = q.dequantize().reshape(-1)
    for start, stop in ((0, 8), (4, 12), (8, 16), (0, 16), (0, 6), (5, 8)):
        assert same(q.slice(start, stop).dequantize(), flat[16 * start : 16 * stop])
    with pytest.raises(ValueError, match="cut through groups of 4 "):
        q.slice(3, 6)


@pytest.mark.parametrize("name", SPECS)
def test_files(name, tmp_path):
    spec, x = SPECS[name], numbers((4, 33))
    q = quantize(x, spec, seed=3)
    path = tmp_path / "a.safetensors"
    safetensors_file.save(path, {"w": q, "plain": x}, {"of": [1, 2]})
    assert safetensors_file.about(path) == {"of": [1, 2]}
    found = safetensors_file.load(path)
    assert found["w"].spec == spec and found["w"].shape == x.shape
    assert same(found["w"].buffer, q.buffer) and same(found["plain"], x)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_small_floats_in_files(name, shape, tmp_path):
    path, x = tmp_path / "a.safetensors", np.ones(shape, getattr(ml_dtypes, name))
    safetensors_file.save(path, {"x": x})
    assert same(safetensors_file.load(path)["x"], x)


def test_plain_arrays_in_files(tmp_path):
    """With their shapes and types; in the byte order of the format."""
    path = tmp_path / "a.safetensors"
    wide = numbers((4, 66))
    arrays = {
        "number": np.float32(3),
        "nothing": np.zeros((0, 5), np.int16),
        "turned": wide.T,
        "gaps": wide[:, ::3],
        "backwards": wide[::-1, ::-1],
        "big endian": wide.astype(">f4"),
        **{dtype: np.ones((), dtype) for dtype in ("bool", "int8", "uint64", "float16", "float64", "complex64")},
    }
    safetensors_file.save(path, arrays)
    for name, found in safetensors_file.load(path).items():
        assert found.shape == arrays[name].shape and found.dtype == arrays[name].dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, arrays[name])
        found[...] = 0
    before = path.read_bytes()
    for wrong, says in (
        ({"a": np.ones(3, np.longdouble)}, "a: expected elements of a type among"),
        ({"a": np.array(["x"])}, "a: expected elements of a type among"),
        ({"a": np.ones(3, object)}, "a: expected elements of a type among"),
        ({"__metadata__": wide}, "arrays: expected names of tensors, found '__metadata__'"),
        ({3: wide}, "arrays: expected names of tensors, found 3"),
    ):
        with pytest.raises(ValueError, match=says):
            safetensors_file.save(path, wrong)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_of_new_files(mask, tmp_path):
    path, before = tmp_path / "a.safetensors", os.umask(mask)
    try:
        safetensors_file.save(path, {})
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    finally:
        os.umask(before)


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "a").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="a is no safetensors file"):
        safetensors_file.load(tmp_path / "a")


def test_parts_are_numbers():
    x = numbers((4, 64))
    for spec in (INT8, NVFP4, NF4):
        q = quantize(x, spec)
        codes = q.integers()
        units = codes if spec.linear else q.levels()[codes]
        scales = np.repeat(q.scales(), q.layout.blocks.size, axis=1).reshape(-1)[: x.size].reshape(x.shape)
        np.testing.assert_array_equal((units * scales).astype(F), q.dequantize())
    q = quantize(x, QuantSpec(4, symmetric=False, granularity=PerTensor()))
    np.testing.assert_array_equal((q.integers() - q.zeros()) * q.scales(), q.dequantize())
