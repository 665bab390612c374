"""Damaged files of quantised arrays: a ValueError, and no other error, whatever the damage."""

import copy
import json
import random
import struct

import numpy as np
import pytest

from quant import INT8, VSQ, QuantizedArray, quantize
from quant.io import safetensors_file

F = np.float32
JUNK = [
    *(None, True, 1, -1, 0, 2**70, 1.5, float("inf"), "x", "", "fp32", [], [1], [[[]]], {}),
    *({"kind": "PerGroup"}, {"kind": []}, {"kind": "PerTensor", "y": 1}, {"format": "uint4"}, {"format": []}),
]


@pytest.fixture
def file(tmp_path):
    """Path of a file, its header and what is behind that."""
    path = tmp_path / "a.safetensors"
    arrays = {"a": quantize(np.ones((4, 32), F), VSQ), "b": quantize(np.ones(3, F), INT8), "c": np.ones(4, F)}
    safetensors_file.save(path, arrays, {"x": 1})
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    return path, json.loads(raw[8:end]), raw[end:]


def write(path, header, meanings, behind):
    """A file as of a program that writes no checksum, so that its contents are looked at."""
    header = copy.deepcopy(header)
    header["__metadata__"].pop(safetensors_file.CHECKSUM, None)
    header["__metadata__"][safetensors_file.KEY] = meanings if isinstance(meanings, str) else json.dumps(meanings)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + behind)


def meanings_of(header):
    return json.loads(header["__metadata__"][safetensors_file.KEY])


def is_loaded_or_refused(path):
    """What is loaded can be dequantised."""
    try:
        for array in safetensors_file.load(path).values():
            if isinstance(array, QuantizedArray):
                array.dequantize()
        safetensors_file.about(path)
    except ValueError:
        return False
    return True


def places(value, at=()):
    yield at
    inner = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in inner:
        yield from places(value[key], (*at, key))


def replaced(value, at, junk):
    if not at:
        return junk
    value = copy.copy(value)
    value[at[0]] = replaced(value[at[0]], at[1:], junk)
    return value


def test_flipped_bytes(file):
    path = file[0]
    raw, draw = path.read_bytes(), random.Random(1)
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    for _ in range(1500):
        damaged = bytearray(raw)
        for _ in range(draw.choice([1, 1, 2, 5])):
            damaged[draw.randrange(end)] = draw.choice([draw.randrange(256), *b'0123456789-"{}[],e.'])
        path.write_bytes(damaged)
        is_loaded_or_refused(path)
    for length in range(0, len(raw), 13):
        path.write_bytes(raw[:length])
        assert not is_loaded_or_refused(path)


def test_any_flipped_byte_of_the_contents(file):
    """Whatever is loaded is what was saved; a file without a checksum, as of old, is loaded as it is."""
    path, header, behind = file
    raw, expected = path.read_bytes(), contents(path)
    for place in range(len(raw) - len(behind) - 700, len(raw), 3):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert contents(path) == expected
        except ValueError:
            continue
        assert place < len(raw) - len(behind)
    write(path, header, meanings_of(header), behind)
    assert contents(path) == expected
    damaged = bytearray(behind)
    damaged[-1] ^= 1
    write(path, header, meanings_of(header), bytes(damaged))
    assert contents(path) != expected
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"a.safetensors is damaged: its checksum is not that of its contents"):
        safetensors_file.load(path)


def contents(path):
    arrays = safetensors_file.load(path)
    parts = {
        name: (array.spec, array.shape, array.buffer.tobytes())
        if isinstance(array, QuantizedArray)
        else (array.dtype, array.shape, array.tobytes())
        for name, array in arrays.items()
    }
    return parts


def test_other_values_of_fields(file):
    path, header, behind = file
    meanings = meanings_of(header)
    for at in places(meanings):
        for junk in JUNK:
            write(path, header, replaced(meanings, at, junk), behind)
            is_loaded_or_refused(path)


@pytest.mark.parametrize("shape", [[-1, -3], [-3], [0, 2**70], [1] * 65 + [3], [3.0], ["3"], [True, 3], 3, {"3": 3}])
def test_shapes_that_no_array_has(file, shape):
    path, header, behind = file
    meanings = meanings_of(header)
    meanings["b"]["shape"] = shape
    write(path, header, meanings, behind)
    with pytest.raises(ValueError, match=r"a.safetensors: b is no quantised array: .*(shape|length)"):
        safetensors_file.load(path)


@pytest.mark.parametrize("depth", [100, 330, 5000])
def test_headers_that_are_too_deep(file, depth):
    path, header, behind = file
    scale = '{"format": "uint4", "parent": ' * depth + '{"format": "fp32"}' + "}" * depth
    for deep in (
        '{"a": {"shape": [4, 32], "spec": {"bits": 4, "scale": ' + scale + "}}}",
        '{"a": {"shape": [4, 32], "spec": ' + '{"spec":' * depth + "1" + "}" * depth + "}}",
        '{"a": {"spec": {"bits": 8}, "shape": ' + "[" * depth + "]" * depth + "}}",
        "[" * depth,
    ):
        write(path, header, deep, behind)
        assert not is_loaded_or_refused(path)


@pytest.mark.parametrize("kind", ["BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F16", "X"])
def test_types_of_tensors_that_are_not_what_was_saved(file, kind):
    path, header, behind = file
    for name in "abc":
        damaged = copy.deepcopy(header)
        damaged[name]["dtype"] = kind
        write(path, damaged, meanings_of(header), behind)
        assert not is_loaded_or_refused(path)


def test_a_meaning_without_a_tensor(file):
    path, header, behind = file
    write(path, header, meanings_of(header) | {"d": meanings_of(header)["b"]}, behind)
    with pytest.raises(ValueError, match="d is no quantised array: the file has no tensor of this name"):
        safetensors_file.load(path)
