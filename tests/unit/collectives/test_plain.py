"""Objects of Python's own types as bytes: the compiled engine and Python read the same."""

import random
import sys

import numpy as np
import pytest

from collectives.engine import plain
from collectives.engine.extension import available, copy_object, read_plain, write_object
from collectives.engine.instructions import FRAME

pytestmark = pytest.mark.skipif(not available(), reason="this installation has no compiled engine")

READERS = pytest.mark.parametrize("read", [read_plain, plain.read_plain], ids=["C", "Python"])

LEAVES = [None, True, False, 0, -1, 2**63 - 1, -(2**63), 0.1, -0.0, float("inf"), b"", b"xy"]
LEAVES += ["", "a", "\xe9", "abc", "caf\xe9", "\u20ac", "\ud800", "a\U0001f600", "x" * 300]


def written(value):
    """Bytes of a value, None if it is left to pickle."""
    from collectives.runtime.methods import object_messages  # noqa: F401  gives the engine MPI.pickle

    return write_object(np.zeros(FRAME, np.uint8), value)


def drawn(rng, levels):
    kind = rng.randrange(10) if levels else 0
    if kind < 6:
        return rng.choice(LEAVES)
    items = [drawn(rng, levels - 1) for _ in range(rng.randrange(5))]
    if kind < 9:
        return tuple(items) if kind == 8 else items
    return dict(zip([1, "key", (1, "x"), None, 2.5], items))


@READERS
def test_drawn_objects(read):
    rng = random.Random(1)
    for _ in range(500):
        value = drawn(rng, 4)
        assert repr(read(written(value))) == repr(value)
        copy = copy_object(value)
        assert copy is NotImplemented or repr(copy) == repr(value)


@READERS
def test_objects_that_appear_twice(read):
    one, pair, text = [1], ([2], 3), "".join(["some", "text"])
    found = read(written([one, one, {"a": one}, pair, pair, text, text]))
    assert found[0] is found[1] is found[2]["a"] and found[3] is found[4] and found[5] is found[6]
    loop = {}
    loop["self"] = [loop]
    found = read(written(loop))
    assert found["self"][0] is found


def test_copies_of_objects_that_appear_twice_are_left_to_others():
    one = [1]
    for value in ([one, one], {"a": (one, one)}, [{"a": one}, {"b": one}]):
        assert copy_object(value) is NotImplemented
    value = ("a", (1, b"x"))
    assert copy_object(value) is value


def test_objects_that_are_left_to_pickle():
    loop = []
    loop.append((loop,))
    within = loop[0]
    values = [1 << 64, {1}, 1j, object(), np.float64(1), type("L", (list,), {})(), "x" * ((1 << 20) + 1), within]
    for value in values:
        assert written(value) is None and written([value]) is None
        if value is not within and not isinstance(value, int | str):
            assert copy_object([value]) is NotImplemented


def test_bytes_that_are_cut_off():
    data = written([1, "text", {"a": (2.5, None)}, b"bytes"])
    for end in range(len(data)):
        with pytest.raises(ValueError, match="own types"):
            read_plain(data[:end])


def test_references_are_released():
    text = "".join(["te", "xt"])
    value, before = [text, {"a": text}], sys.getrefcount(text)
    for _ in range(100):
        read_plain(written(value))
        copy_object(value)
        assert written([text, {1}]) is None
        assert copy_object([text, {1}]) is NotImplemented
    assert sys.getrefcount(text) == before
