"""Constants of kernels stand once: in C, in CUDA text, and in the references in NumPy."""

import ast
import math
import re
from collections import defaultdict
from itertools import filterfalse

import numpy as np
import pytest
from support.sources import SOURCES

from quant.kernels import headers

FOLDERS = ("quant/kernels", "parallel/nn/kernels", "parallel/optim/kernels", "collectives/transport/gpu")
FILES = sorted(path for one in FOLDERS for path in (SOURCES / one).iterdir() if path.suffix in (".h", ".c", ".py"))
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?")


def python_literals(text):
    """Float literals of Python code, and of CUDA text in its strings; docstrings do not count."""
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            yield repr(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from NUMBER.findall(COMMENT.sub("", node.value))


def literals(path):
    """Float literals of a source file."""
    text = path.read_text()
    return list(python_literals(text)) if path.suffix == ".py" else NUMBER.findall(COMMENT.sub("", text))


def digits(literal):
    """Significant digits of a literal."""
    return re.sub(r"[eE].*|\.", "", literal).strip("0")


def is_evident(literal):
    """True for whole numbers, powers of ten, and short powers of two: nobody would look them up."""
    value, own = float(literal), digits(literal)
    return value.is_integer() or own == "1" or (math.frexp(value)[0] == 0.5 and len(own) <= 3)


def repeated(paths):
    """Places of each constant that several literals have: they are equal in all digits of the shortest."""
    alike = defaultdict(list)
    for path in paths:
        for literal in filterfalse(is_evident, literals(path)):
            alike[np.float32(literal)].append((path.name, literal))
    places = defaultdict(list)
    for found in alike.values():
        shown = min(len(digits(literal)) for _, literal in found)
        for name, literal in found:
            places[f"{float(literal):.{max(shown, 7) - 1}e}"].append(f"{name}: {literal}")
    return {value: found for value, found in places.items() if len(found) > 1}


def test_each_constant_stands_once():
    assert len(FILES) > 30
    assert not repeated(FILES)


@pytest.mark.parametrize(
    "one, other",
    [
        ("#define CUBIC ((W)0.044715) /* 0.044715 */", "CUBIC = 0.044715"),
        ("x * 1.44269504088896341f", 'TEXT = f"y = {x} * 1.44269504f;"'),
        ("x * 1.25e3f + 2.5e-4f; // 2.5e-4", "x = 0.5 * 1e-5 + 2.50e-4"),
    ],
)
def test_a_constant_in_c_and_in_python_is_found(tmp_path, one, other):
    paths = tmp_path / "one.h", tmp_path / "other.py"
    for path, text in zip(paths, (one, other)):
        path.write_text(text)
    (found,) = repeated(paths).values()
    assert [place.partition(":")[0] for place in found] == ["one.h", "other.py"]


def test_a_constant_twice_in_a_file_is_found(tmp_path):
    path = tmp_path / "one.py"
    path.write_text('"""Below 0.46875."""\nx = clip(x, 0.46875, 4.0)\ny = x <= 0.46875\nz = 0.5 * x + 0.5 * y\n')
    assert list(repeated([path]).values()) == [["one.py: 0.46875"] * 2]


def test_python_reads_the_constants_of_headers():
    found = headers.constants(("parallel.nn.kernels", "scalar.h"))
    assert found["CUBIC"] == 0.044715 and found["FAR"] == 16 and found["LOWEST"] == -87
    assert headers.constants(headers.FORMULAS)["UNIT_24"] == 2**-24
    assert headers.constants(headers.FORMULAS)["MIX_FIRST"] == 0x85EBCA6B
