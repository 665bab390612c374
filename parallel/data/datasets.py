"""Data sets for training and test, by name or path: built-in ones without downloads, and users' files.

Data depend only on the name, the seed and files on disk, so all ranks have the same without communication.
"""

from __future__ import annotations

import re
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from parallel.data.sampler import Dataset
from parallel.data.shards import INDEX, OPEN_SHARDS, ShardIndex
from parallel.data.text import text_files, text_form
from parallel.runtime.validation import exact_integers

HELD_OUT = 10
"""One in this number of samples of .npz files, documents of pydoc, or bytes of text files is for the test."""


@dataclass(frozen=True)
class ArrayDataset:
    """Data set in two arrays, samples along axis 0. `y` has integer classes (negative: none) or float targets."""

    x: np.ndarray
    y: np.ndarray

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"x has {len(self.x)} samples, y has {len(self.y)}")

    def __len__(self) -> int:
        return len(self.x)

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(x, y) of the samples at `indices`, as copies."""
        return self.x[indices], self.y[indices]

    def flat(self) -> ArrayDataset:
        """Same data set with each sample of x flattened to one dimension."""
        return self.map_inputs(lambda x: x.reshape(len(x), int(np.prod(x.shape[1:]))))

    def map_inputs(self, change: Callable[[np.ndarray], np.ndarray]) -> ArrayDataset:
        """Same data set with inputs ``change(x)``."""
        return ArrayDataset(change(self.x), self.y)


@dataclass(frozen=True)
class TokenWindows:
    """Data set of windows of `length` bytes (or tokens) of a text, `stride` apart. Targets are inputs shifted by one.

    Stride 0 means `length`: each byte is a target once per epoch, except the first and a rest below `length`.
    """

    text: np.ndarray
    length: int
    stride: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.stride < 0:
            raise ValueError(f"length: expected 1 or more, found {self.length}; stride: 0 or more, found {self.stride}")

    def __len__(self) -> int:
        return max(0, (len(self.text) - self.length - 1) // (self.stride or self.length) + 1)

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(x, y) of the windows at `indices`: int64, both of shape (windows, length)."""
        indices = exact_integers(indices, "indices")
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"windows {indices.min()} to {indices.max()} of a text that has {len(self)}")
        places = indices[:, None] * (self.stride or self.length) + np.arange(self.length + 1)
        windows = self.text[places].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class LearningTask:
    """Training and test data sets, kind of targets, shape of inputs, and number of outputs.

    Attributes
    ----------
    kind : {"classes", "bytes", "tokens", "values"}
        y holds a class per sample, the next byte or token at each position, or float32 values.
    inputs : tuple of int
        Shape of a sample of x: float32, or integers for embeddings.
    outputs : int
        Classes, distinct bytes or tokens, or values per sample: the size of a model's output (per position).
    window : int or None
        Neighbouring samples to shuffle among themselves (`parallel.data.sampler.Sampler`), if not all.
    """

    name: str
    train: Dataset
    test: Dataset
    kind: str
    inputs: tuple[int, ...]
    outputs: int
    window: int | None = None

    @property
    def is_text(self) -> bool:
        """True if samples are sequences of bytes or tokens, whose next ones are the targets."""
        return self.kind in ("bytes", "tokens")


def digits(seed: int = 0, length: int = 0) -> LearningTask:
    """Scikit-learn's handwritten digits: 1797 images, 8 x 8 values in [0, 1], ten classes. A fifth is for the test."""
    package = find_spec("sklearn")  # not imported, as that takes longer than the rest of a program's start
    if package is None or not package.submodule_search_locations:
        raise ImportError("the data set digits needs scikit-learn: pip install 'chorus-mpi[train]'")
    table = np.loadtxt(Path(package.submodule_search_locations[0], "datasets/data/digits.csv.gz"), delimiter=",")
    x, y = (table[:, :-1] / 16).astype(np.float32).reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    return _classes("digits", *_split(ArrayDataset(x, y), seed, 5))


def teacher(seed: int = 0, length: int = 0) -> LearningTask:
    """Regression on a random two-layer network: 32 inputs, 4 outputs. 4096 training and 512 test samples."""
    x, values = _teach(seed, 4)
    whole = ArrayDataset(x, values.astype(np.float32))
    return LearningTask("teacher", *_cut(whole, 4096), "values", (32,), 4)


def teacher_classes(seed: int = 0, length: int = 0) -> LearningTask:
    """Classification: the class is the index of the largest of 8 outputs of a random two-layer network."""
    x, values = _teach(seed, 8)
    return _classes("teacher_classes", *_cut(ArrayDataset(x, values.argmax(1).astype(np.int64)), 4096), outputs=8)


def _teach(seed: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([seed, outputs])
    x = random.standard_normal((4096 + 512, 32), np.float32)
    inner, outer = random.standard_normal((32, 64)) / 32**0.5, random.standard_normal((64, outputs)) / 8
    return x, np.tanh(x @ inner) @ outer


LONGEST = 1 << 12
"""Largest length of generated sequences. All of them are in memory."""


def copy(seed: int = 0, length: int = 64) -> LearningTask:
    """Copy task, 4096 training and 512 test sequences: length / 2 random bytes, a zero byte, the same bytes again.

    y is x shifted by one, and -1 where it cannot be predicted.
    """
    half = length // 2
    if half < 1 or length % 2 or length > LONGEST:
        raise ValueError(f"length: the copy task takes an even number from 2 to {LONGEST}, found {length}")
    random = np.random.default_rng([seed, length])
    words = random.integers(1, 256, (4096 + 512, half))
    whole = np.concatenate([words, np.zeros_like(words[:, :1]), words], axis=1)
    x, y = whole[:, :-1].copy(), whole[:, 1:].copy()
    y[:, :half] = -1
    return LearningTask("copy", *_cut(ArrayDataset(x, y), 4096), "bytes", (length,), 256)


def pydoc(seed: int = 0, length: int = 128) -> LearningTask:
    """Bytes of the Python standard library's documentation. About a tenth of modules and topics is the test set.

    Repeated paragraphs are kept once, so only short phrases occur in both texts.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name, text in library():
        parts[zlib.crc32(f"{seed} {name}".encode()) % HELD_OUT == 0].append(text.encode())
    train, test = (np.frombuffer(b"\n\n".join(texts), np.uint8) for texts in parts)
    return _text("pydoc", train, test, length)


@lru_cache(maxsize=1)
def library() -> tuple[tuple[str, str], ...]:
    """(name, text) of each documented module and topic of the standard library, read from its sources: 3 MB in 2 s."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if not OUTSIDE & set(place.parts):
            source = path.read_bytes().decode(errors="replace").replace("\r\n", "\n")
            found.append((place.as_posix(), documentation(source)))
    from pydoc_data.topics import topics

    found += [(f"topic {name}", iter([topics[name]])) for name in sorted(topics)]
    documents, seen = [], set()
    for name, pieces in found:
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", "\n\n".join(pieces).strip()):
            # repeated paragraphs (licences, idioms) would put test text into the training text
            if paragraph not in seen:
                paragraphs.append(paragraph)
            if len(paragraph) > PHRASE:
                seen.add(paragraph)
        if text := "\n\n".join(paragraphs):
            documents.append((name, text))
    return tuple(documents)


PHRASE = 60
"""Longest paragraph in characters that may occur repeatedly."""

OUTSIDE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
"""Skipped folders of the library."""

LITERAL = re.compile(
    r'"""(?P<long>[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*)"""'
    r"|'''(?P<other>[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*)'''"
    r'|"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*'"
    r"|#(?P<comment>[^\n]*(?:\n[ \t]*#[^\n]*)*)",
    re.DOTALL,
)
"""Long strings, short strings, and runs of comments of a Python source."""

PREFIX = re.compile(r"\s*[rRuU]?")


def documentation(source: str) -> Iterator[str]:
    """Docstrings and comments that stand on lines of their own in Python source code, without indentation.

    >>> list(documentation("# one\\n# two\\nx = '#'  # three\\ndef f():\\n    '''Four.\\n\\n    Five.'''\\n"))
    ['one\\ntwo', 'Four.\\n\\nFive.']
    """
    for match in LITERAL.finditer(source):
        before = source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
        text = match["long"] or match["other"] or match["comment"]
        # a literal behind code is data, not documentation
        if text and PREFIX.fullmatch(before):
            strip = r"\n[ \t]*#* ?" if match["comment"] else r"\n" + before[: len(before) - len(before.lstrip())]
            text = re.sub(strip, "\n", text.lstrip("# ") if match["comment"] else text).strip()
            if text:
                yield text


def from_npz(path: Path, seed: int = 0, length: int = 0) -> LearningTask:
    """Data set from a .npz file with arrays `x` and `y`. The test set is `x_test` and `y_test`, or a random tenth.

    Floats become float32, integers int64: in x for embeddings, in y classes, one per sample.
    """
    held = _arrays(path)
    tests = {"x_test", "y_test"}
    names = {"x", "y"} | (tests if tests & set(held) else set())
    if missing := sorted(names - set(held)):
        raise ValueError(f"{path}: {', '.join(missing)} missing; found {', '.join(sorted(held)) or 'no arrays'}")
    whole = _pair(path, held["x"], held["y"], "")
    if not len(whole):
        raise ValueError(f"{path}: x has no samples")
    for name, array in (("x", whole.x), ("y", whole.y)):
        if not array.size:
            raise ValueError(f"{path}: samples of {name} have no values, but shape {array.shape[1:]}")
    # losses do not count classes below 0, so nothing could be learned
    if whole.y.dtype == np.int64 and whole.y.max() < 0:
        raise ValueError(f"{path}: y: no sample has a class, all numbers are below 0")
    if "x_test" not in names:
        train, test = _split(whole, seed, HELD_OUT)
    else:
        train, test = whole, _pair(path, held["x_test"], held["y_test"], "_test")
        for name, mine, other in (("x", train.x, test.x), ("y", train.y, test.y)):
            if (mine.shape[1:], mine.dtype) != (other.shape[1:], other.dtype):
                raise ValueError(
                    f"{path}: samples of {name} are {mine.dtype} of shape {mine.shape[1:]}, those of {name}_test "
                    f"{other.dtype} of shape {other.shape[1:]}"
                )
    if whole.y.dtype == np.int64:
        return _classes(path.stem, train, test)
    return LearningTask(path.stem, train, test, "values", whole.x.shape[1:], int(np.prod(whole.y.shape[1:])))


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file:
        try:
            archive = np.load(file)
            if isinstance(archive, np.ndarray):
                raise ValueError("it is a single array")
            return {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path}: not an archive of plain arrays (.npz): {error}") from error


def _pair(path: Path, x: np.ndarray, y: np.ndarray, end: str) -> ArrayDataset:
    for name, array in ((f"x{end}", x), (f"y{end}", y)):
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{path}: {name}: expected real numbers, found {array.dtype}")
        if array.ndim == 0:
            raise ValueError(f"{path}: {name}: expected samples along the first axis, found a single number")
        if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"{path}: {name}: {array.max()} is too large for int64")
    if len(x) != len(y):
        raise ValueError(f"{path}: x{end} has {len(x)} samples, y{end} has {len(y)}")
    if y.dtype.kind != "f" and y.ndim != 1:
        raise ValueError(f"{path}: y{end}: expected one class for each sample, found integers of shape {y.shape}")
    # overflow is found below, with a message that names the array
    with np.errstate(over="ignore"):
        pair = [array.astype(np.float32 if array.dtype.kind == "f" else np.int64) for array in (x, y)]
    for name, array in (("x", pair[0]), ("y", pair[1])):
        if not np.isfinite(array).all():
            raise ValueError(f"{path}: {name}{end}: not all values are finite in {array.dtype}")
    return ArrayDataset(*pair)


def from_text(path: Path, seed: int = 0, length: int = 128, tokenizer: str = "") -> LearningTask:
    """Data set of windows of the bytes, or tokens, of a file, or of all ``*.txt`` in a folder.

    The last tenth of each file is for the test.
    """
    form, parts = text_form(tokenizer), ([], [])  # type: ignore[var-annotated]
    for file in text_files(path):
        numbers = form.encode(file.read_bytes())
        cut = len(numbers) - len(numbers) // HELD_OUT
        for part, some in zip(parts, (numbers[:cut], numbers[cut:])):
            part.append(some)
    train, test = map(np.concatenate, parts)
    return _text(path.name, train, test, length, form.kind, form.size)


def from_shards(folder: Path, seed: int = 0, length: int = 128) -> LearningTask:
    """Data set in a folder of memory-mapped shards, read as needed (`parallel.data.shards`).

    Samples are shuffled among the samples of neighbouring shards: half as many shards as can be open.
    """
    index = ShardIndex(folder)
    if index.kind == "tokens":
        train, test = (index.tokens(part, lambda tokens: TokenWindows(tokens, length)) for part in ("train", "test"))
        inputs: tuple[int, ...] = (length,)
    else:
        train, test = index.arrays("train"), index.arrays("test")
        inputs = train.take(np.zeros(0, np.int64))[0].shape[1:]
    if not len(train):
        raise ValueError(f"{folder}: the shards of train have no samples")
    window = -(-len(train) * OPEN_SHARDS // (2 * train.parts)) if train.parts > OPEN_SHARDS else None
    return LearningTask(folder.name, train, test, index.kind, inputs, index.outputs, window)


TASKS: dict[str, Callable[[int, int], LearningTask]] = {
    "digits": digits,
    "pydoc": pydoc,
    "teacher": teacher,
    "teacher_classes": teacher_classes,
    "copy": copy,
}


def load(source: str, *, seed: int = 0, length: int = 128, tokenizer: str = "") -> LearningTask:
    """Load a data set by name (a key of `TASKS`) or path: shards, arrays in a .npz file, else text.

    Shards are in a folder with an index. `seed` is that of the split and of generated data, `length` that of sequences
    in tasks that have them, and `tokenizer` a file for text of files, which is taken as bytes without one.
    """
    path = Path(source)
    is_shards = path.is_dir() and (path / INDEX).is_file()
    if tokenizer and (source in TASKS or is_shards or path.suffix == ".npz"):
        raise ValueError(f"tokenizer: expected a text file, or a folder of them, as data; found {source}")
    if source in TASKS:
        return TASKS[source](seed, length)
    if is_shards:
        return from_shards(path, seed, length)
    if not path.exists():
        raise FileNotFoundError(f"data {source!r}: neither a file nor one of {', '.join(TASKS)}")
    return from_npz(path, seed, length) if path.suffix == ".npz" else from_text(path, seed, length, tokenizer)


def _split(whole: ArrayDataset, seed: int, share: int) -> tuple[ArrayDataset, ArrayDataset]:
    """Random split into training and test samples. 1 / `share` of them, rounded down, are for the test."""
    order = np.random.default_rng(seed).permutation(len(whole))
    cut = len(whole) - len(whole) // share
    return ArrayDataset(*whole.take(order[:cut])), ArrayDataset(*whole.take(order[cut:]))


def _cut(whole: ArrayDataset, at: int) -> tuple[ArrayDataset, ArrayDataset]:
    return ArrayDataset(whole.x[:at], whole.y[:at]), ArrayDataset(whole.x[at:], whole.y[at:])


def _classes(name: str, train: ArrayDataset, test: ArrayDataset, outputs: int = 0) -> LearningTask:
    outputs = max([outputs, *(int(part.y.max()) + 1 for part in (train, test) if len(part))])
    return LearningTask(name, train, test, "classes", train.x.shape[1:], outputs)


def _text(
    name: str, train: np.ndarray, test: np.ndarray, length: int, kind: str = "bytes", size: int = 256
) -> LearningTask:
    parts = TokenWindows(train, length), TokenWindows(test, length)
    if not len(parts[0]):
        raise ValueError(
            f"{name}: expected {length} + 1 {kind} for training or more, found {len(train)}, too few for one window; "
            "a shorter length may do"
        )
    return LearningTask(name, *parts, kind, (length,), size)
