"""Data sets: what they hold, that nothing of the test is in the training, and what bad files are told."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.data import datasets
from parallel.data.datasets import TASKS, ArrayDataset, TokenWindows, documentation, from_npz, load
from parallel.data.sampler import Sampler
from parallel.data.sequences import PaddedSequences, TokenSampler
from parallel.data.text import TextBytes


@pytest.mark.parametrize("name", TASKS)
class TestTasks:
    def test_samples_are_as_described(self, name):
        task = load(name, length=16)
        for part in (task.train, task.test):
            indices = np.array([len(part) - 1, 0, 1])
            x, y = part.take(indices)
            assert x.shape == (3, *task.inputs)
            if task.kind == "values":
                assert (y.dtype, y.shape) == (np.float32, (3, task.outputs))
            else:
                assert y.dtype == np.int64 and y.shape == ((3,) if task.kind == "classes" else x.shape)
                assert y.max() < task.outputs
            assert x.dtype == (np.int64 if task.kind == "bytes" else np.float32)
            for once, again in zip((x, y), part.take(indices), strict=True):
                np.testing.assert_array_equal(once, again)
            assert part.take(indices[:0])[0].shape == (0, *task.inputs)

    def test_what_is_taken_may_be_written_into(self, name):
        task = load(name, length=16)
        x, y = task.train.take(np.array([1]))
        before = x.copy(), y.copy()
        x += 1
        y += 1
        for now, then in zip(task.train.take(np.array([1])), before, strict=True):
            np.testing.assert_array_equal(now, then)

    def test_the_seed_decides(self, name):
        first, same, other = (load(name, seed=seed, length=16).test.take(np.arange(50))[0] for seed in (1, 1, 2))
        np.testing.assert_array_equal(first, same)
        assert (first != other).any()


def test_no_digit_is_in_both_parts():
    """Images are not all different, so count: together the parts are what scikit-learn has."""
    sklearn = pytest.importorskip("sklearn.datasets")
    images, labels = sklearn.load_digits(return_X_y=True)
    task = load("digits", seed=3)
    assert (len(task.train), len(task.test), task.outputs) == (1438, 359, 10)

    def listed(x, y):
        return sorted([*image, label] for image, label in zip((x.reshape(-1, 64) * 16).tolist(), y.tolist()))

    both = [np.concatenate(pair) for pair in zip((task.train.x, task.train.y), (task.test.x, task.test.y))]
    assert listed(*both) == listed(images / 16, labels)


def test_flat_images():
    images = ArrayDataset(np.arange(24.0).reshape(2, 3, 4), np.arange(2))
    assert images.flat().take(np.array([1]))[0].tolist() == [list(range(12, 24))]
    assert ArrayDataset(np.zeros((0, 3, 4)), np.zeros(0)).flat().x.shape == (0, 12)


# The standard library's documentation.


@pytest.fixture(scope="module")
def library():
    return datasets.library()


def test_there_are_megabytes_of_it(library):
    assert sum(len(text) for _, text in library) > 2_000_000
    names = [name for name, _ in library]
    assert len(set(names)) == len(names) > 500
    assert {"json/encoder.py", "topic assert"} <= set(names)
    assert not any("site-packages" in name or "/test/" in name for name in names)


def test_nothing_of_the_test_is_trained_on(library):
    task = load("pydoc")
    train, test = (bytes(part.text) for part in (task.train, task.test))
    total = len(train) + len(test)
    assert total == sum(len(text.encode()) for _, text in library) + 2 * (len(library) - 2)
    assert 0.03 < len(test) / total < 0.3
    paragraphs = [set(text.split(b"\n\n")) for text in (train, test)]
    assert max(map(len, paragraphs[0] & paragraphs[1])) <= datasets.PHRASE


def test_docstrings_are_those_that_python_finds():
    """Of a module that has nothing odd in it: the same, but for the indentation of first lines."""
    import textwrap as module

    source = Path(module.__file__).read_text()
    found = set(documentation(source))
    nodes = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    docstrings = [ast.get_docstring(node) for node in nodes]
    plain = {text.strip() for text in docstrings if text and "\\" not in text}
    assert len(plain) > 5 and plain <= found


@pytest.mark.parametrize(
    "source, found",
    [
        ("", []),
        ("x = 1  # beside\n", []),
        ("x = '''\n# no comment\n'''\n", []),
        ("x = '# no'\n# yes\n", ["yes"]),
        ('"""One."""\nclass A:\n    r"""Two\n\n    \\d three."""\n', ["One.", "Two\n\n\\d three."]),
        ("    # a\n    #  b\n\n    # c\n", ["a\n b", "c"]),
        ('"""never closed\n', []),
        ("''''''\n#\n", []),
    ],
)
def test_documentation_of_a_source(source, found):
    assert list(documentation(source)) == found


@pytest.mark.timeout(120)
def test_another_process_finds_the_same(library):
    code = "import zlib; from parallel.data.datasets import library; print(zlib.crc32(repr(library()).encode()))"
    root = str(Path(datasets.__file__).parents[1])
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    import zlib

    assert int(done.stdout) == zlib.crc32(repr(library).encode())


# Made up.


def test_the_copy_task_can_be_solved_where_it_is_asked():
    task = load("copy", length=6)
    x, y = task.train.take(np.arange(100))
    assert (x[:, 3] == 0).all() and (np.delete(x, 3, axis=1) > 0).all()
    assert (y[:, :3] == -1).all()
    np.testing.assert_array_equal(y[:, 3:], x[:, :3])
    np.testing.assert_array_equal(y[:, 3:5], x[:, 4:])


@pytest.mark.parametrize("length", [0, 1, 7, -2, 10**6])
def test_lengths_that_the_copy_task_cannot_have(length):
    with pytest.raises(ValueError, match="an even number from 2 to 4096"):
        load("copy", length=length)


def test_all_of_the_teachers_classes_occur():
    task = load("teacher_classes")
    assert (np.bincount(task.train.y, minlength=8) > 100).all()


# Windows of a text.


@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 25))
def test_windows(size, length, stride):
    text = np.arange(size, dtype=np.uint8)
    windows = TokenWindows(text, length, stride)
    starts = list(range(0, max(size - length, 0), stride or length))
    assert len(windows) == len(starts)
    x, y = windows.take(np.arange(len(windows)))
    assert x.shape == y.shape == (len(starts), length)
    assert x.tolist() == [list(range(start, start + length)) for start in starts]
    assert (y == x + 1).all()
    if not stride:
        assert sorted(y.reshape(-1)) == list(range(1, len(starts) * length + 1)), "each byte is a target once"


@pytest.mark.parametrize("index", [-1, 3])
def test_windows_that_are_not_there(index):
    with pytest.raises(IndexError, match="of a text that has 3"):
        TokenWindows(np.zeros(10, np.uint8), 3).take(np.array([index]))


@pytest.mark.parametrize("index", [0.5, 1.0, True, "1"])
def test_indices_that_are_no_integers(index):
    with pytest.raises(ValueError, match="indices: expected integers"):
        TokenWindows(np.zeros(10, np.uint8), 3).take([index])
    with pytest.raises(ValueError, match="indices: expected integers"):
        PaddedSequences([np.arange(5)]).take([index])
    with pytest.raises(ValueError, match="lengths: expected integers"):
        TokenSampler([index], 60)


def test_every_place_of_a_long_text_through_the_sampler():
    windows = TokenWindows(np.arange(250, dtype=np.uint8), 10, stride=1)
    sampler = Sampler(len(windows), 32, 5, seed=2)
    firsts = [
        x for step in sampler.steps(0) for batch in step.batches(windows, range(len(step.parts))) for x in batch.x[:, 0]
    ]
    assert sorted(firsts) == list(range(240))


@pytest.mark.parametrize("arguments, message", [((0, 1), "length: .* found 0"), ((1, -1), "stride: .* found -1")])
def test_bad_windows(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenWindows(np.zeros(10, np.uint8), *arguments)


# A user's files.


@pytest.fixture
def npz(tmp_path):
    def write(**arrays):
        np.savez(tmp_path / "mine.npz", **arrays)
        return tmp_path / "mine.npz"

    return write


def test_a_users_arrays(npz):
    task = load(str(npz(x=np.arange(60.0).reshape(30, 2), y=np.arange(30) % 3)))
    assert (task.name, task.kind, task.inputs, task.outputs) == ("mine", "classes", (2,), 3)
    assert (len(task.train), len(task.test)) == (27, 3)
    assert sorted([*task.train.x[:, 0], *task.test.x[:, 0]]) == list(range(0, 60, 2))
    assert task.train.x.dtype == np.float32 and task.train.y.dtype == np.int64


def test_a_users_own_test(npz):
    path = npz(x=np.ones((4, 2)), y=np.ones((4, 5)), x_test=np.zeros((2, 2)), y_test=np.zeros((2, 5)))
    task = load(str(path))
    assert (task.kind, task.outputs, len(task.train), len(task.test)) == ("values", 5, 4, 2)


def test_fewer_than_ten_samples_are_all_for_training(npz):
    task = load(str(npz(x=np.ones((9, 1)), y=np.zeros(9, bool))))
    assert (len(task.train), len(task.test), task.outputs) == (9, 0, 1)


X, Y = np.ones((4, 2)), np.arange(4)


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({}, "x, y missing; found no arrays"),
        ({"x": X, "labels": Y}, "y missing; found labels, x"),
        ({"x": X, "y": Y, "x_test": X}, "y_test missing"),
        ({"x": X, "y": Y[:3]}, "x has 4 samples, y has 3"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y[:2]}, "x_test has 4 samples, y_test has 2"),
        (
            {"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y},
            r"of shape \(2,\), those of x_test float32 of shape \(1,\)",
        ),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y * 1.0}, "samples of y are int64 .* y_test float32"),
        ({"x": X * 1j, "y": Y}, "x: expected real numbers, found complex128"),
        ({"x": X, "y": Y.astype(str)}, "y: expected real numbers, found <U"),
        ({"x": X, "y": Y.astype(object)}, "not an archive of plain arrays"),
        ({"x": X * np.nan, "y": Y}, "x: not all values are finite"),
        ({"x": np.float64(1), "y": Y}, "x: expected samples along the first axis"),
        ({"x": X, "y": X.astype(int)}, "one class for each sample, found integers of shape"),
        ({"x": X[:0], "y": Y[:0]}, "x has no samples"),
        ({"x": X[:, :0], "y": Y}, r"samples of x have no values, but shape \(0,\)"),
        ({"x": X, "y": X[:, :0]}, r"samples of y have no values, but shape \(0,\)"),
        ({"x": X * 1e39, "y": Y}, "x: not all values are finite in float32"),
        ({"x": X, "y": Y - 4}, "no sample has a class, all numbers are below 0"),
        ({"x": X, "y": np.full(4, 2**64 - 1, np.uint64)}, "y: 18446744073709551615 is too large for int64"),
    ],
)
def test_arrays_that_are_no_data_set(npz, arrays, message):
    path = npz(**arrays)
    with pytest.raises(ValueError, match=re.escape(str(path)) + ": .*" + message):
        load(str(path))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut", "a single array", "truncated"])
def test_files_that_are_no_archives(tmp_path, npz, content):
    path = npz(x=X, y=Y)
    if content == "a single array":
        np.save(tmp_path / "other", X)
        (tmp_path / "other.npy").rename(path)
    else:
        path.write_bytes(path.read_bytes()[:-40] if content == "truncated" else content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        from_npz(path)


def test_a_users_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(200)))
    task = load(str(path), length=8)
    assert (task.name, task.kind, task.inputs, task.outputs) == ("text.txt", "bytes", (8,), 256)
    assert bytes(task.train.text) + bytes(task.test.text) == bytes(range(200))
    assert (len(task.train), len(task.test)) == (22, 2)


def test_a_folder_of_texts(tmp_path):
    """The last tenth of each file is for the test; other files, and folders in it, do not count."""
    (tmp_path / "texts" / "more").mkdir(parents=True)
    for name, first in (("b.txt", 100), ("a.txt", 0), ("more/c.txt", 150), ("a.md", 200)):
        (tmp_path / "texts" / name).write_bytes(bytes(range(first, first + 50)))
    task = load(str(tmp_path / "texts"), length=8)
    assert (task.name, task.kind, task.outputs) == ("texts", "bytes", 256)
    assert bytes(task.train.text) == bytes([*range(45), *range(100, 145)])
    assert bytes(task.test.text) == bytes([*range(45, 50), *range(145, 150)])


def test_a_folder_without_texts(tmp_path):
    with pytest.raises(ValueError, match=r"expected index.json, of shards, or files \*.txt; found neither"):
        load(str(tmp_path))


@pytest.mark.parametrize("text", ["plain", "naïve ﬁ 𝒳", ""])
def test_text_streams_by_characters(text):
    form = TextBytes()
    numbers = form.encode(text.encode()).tolist()
    pieces = list(form.stream(numbers))
    assert "".join(pieces) == text and len(pieces) == len(numbers) + 1
    assert "".join(form.stream(numbers[:-1])) == (text[:-1] if text.isascii() else text[:-1] + "\ufffd")


@pytest.mark.parametrize(
    ("data", "content", "error", "text"),
    [
        ("pydoc", "", ValueError, "tokenizer: expected a text file, or a folder of them, as data; found pydoc"),
        ("t.txt", None, FileNotFoundError, "there is no such file"),
        ("t.txt", "{}", ValueError, "expected a file of the library tokenizers"),
    ],
)
def test_tokenizers_that_do_not_fit(tmp_path, data, content, error, text):
    if data != "pydoc":
        pytest.importorskip("tokenizers")
    (tmp_path / "t.txt").write_text("some text")
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(error, match=text):
        load(data if data == "pydoc" else str(tmp_path / data), tokenizer=str(tmp_path / "t.json"))


def test_a_tokenizer_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "t.txt").write_text("some text")
    with pytest.raises(ImportError, match=r"pip install 'chorus-mpi\[text\]'"):
        load(str(tmp_path / "t.txt"), tokenizer="other.json")


@pytest.mark.parametrize("text", [b"", b"a", b"12345678"])
def test_texts_that_are_too_short(tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_bytes(text)
    with pytest.raises(
        ValueError, match=rf"text.txt: expected 8 \+ 1 bytes for training or more, found {len(text)}, too few"
    ):
        load(str(path), length=8)


def test_a_name_that_is_none():
    with pytest.raises(FileNotFoundError, match="neither a file nor one of digits, pydoc, teacher"):
        load("digit")
