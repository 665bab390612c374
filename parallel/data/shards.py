"""Sharded data sets: folders of memory-mapped files with an index, for data larger than memory.

A folder has a file ``index.json``, made by `ShardWriter` or by hand, and any number of shards:

    {"kind": "classes", "outputs": 10, "scale": 0.00392156862745098,
     "train": [{"x": "train-00000.x.npy", "y": "train-00000.y.npy"}, ...], "test": [...]}
    {"kind": "tokens", "outputs": 50257,
     "train": [{"x": "train-00000.bin", "dtype": "<u2"}, ...], "test": [...]}

Samples lie along the first axis of x and y. The kind is "classes" or "values" (y are float32). Tokens are one
long vector a shard, cut into windows when read. A window lies in one shard. Files end in ``.npy``, or in ``.bin`` for
raw elements of the named dtype. x times `scale`, if there is one, is float32. Otherwise floats become float32 and
integers int64.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from parallel.data.sampler import Dataset
from parallel.runtime.validation import exact_integers, is_real

INDEX = "index.json"

OPEN_SHARDS = 8
"""Most shards of a data set that are mapped at a time."""

MAPPED_BYTES = 32 << 20
"""Bytes of a mapped shard whose pages are resident at most. With `OPEN_SHARDS`, it bounds the resident memory."""

FAULT_AROUND = 1 << 16
"""Bytes that Linux makes resident where one page is read first, if they are cached (``fault_around_bytes``)."""

KINDS = ("classes", "values", "tokens")


class ConcatDataset:
    """Data set of several parts, one after another, each opened when needed. `OPEN_SHARDS` stay open.

    Parameters
    ----------
    sizes : samples of each part
    load : function from the number of a part to the part
    change : function applied to the inputs of taken samples
    most : samples taken from a part at a time, if bounded
    """

    def __init__(
        self,
        sizes: Sequence[int],
        load: Callable[[int], Dataset],
        change: Callable[[np.ndarray], np.ndarray] = lambda x: x,
        most: int | None = None,
    ):
        self._starts = np.array([0, *accumulate(sizes)], np.int64)
        self._sizes, self._load, self._change, self._most = sizes, load, change, most
        self._part = lru_cache(OPEN_SHARDS)(load)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self._sizes)

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        indices = exact_integers(indices, "indices")
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} of a data set that has {len(self)}")
        parts = np.searchsorted(self._starts, indices, side="right") - 1
        x, y = self._part(int(parts[0]) if indices.size else 0).take(indices[:0])
        x, y = (np.empty((len(indices), *array.shape[1:]), array.dtype) for array in (x, y))
        for part in np.unique(parts).tolist():
            samples = np.flatnonzero(parts == part)
            samples = samples[np.argsort(indices[samples])]  # neighbours in a file are read together
            for start in range(0, len(samples), self._most or len(samples)):
                here = samples[start:][: self._most]
                x[here], y[here] = self._part(part).take(indices[here] - self._starts[part])
        return self._change(x), y

    def map_inputs(self, change: Callable[[np.ndarray], np.ndarray]) -> ConcatDataset:
        """Same data set, with `change` applied to inputs when they are taken."""
        return ConcatDataset(self._sizes, self._load, lambda x: change(self._change(x)), self._most)


class MappedSamples:
    """Data set on memory maps whose pages are unmapped again: about `MAPPED_BYTES` of them are resident at most.

    Unmapped pages stay in the system's cache while there is memory for them.

    Attributes
    ----------
    most : int or None
        Samples that may be taken at a time. None if all of them are small enough.
    """

    def __init__(self, samples: Dataset, maps: Sequence[np.ndarray]):
        self._samples, self._maps, self._taken = samples, maps, 0
        nbytes = sum(array.nbytes for array in maps)
        each = nbytes // max(1, len(samples)) + FAULT_AROUND
        self.most = None if nbytes <= MAPPED_BYTES else max(1, MAPPED_BYTES // each)

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._taken += len(indices)
        if self.most is not None and self._taken > self.most:
            self._taken = len(indices)
            for array in self._maps:
                _unmap_pages(array)
        return self._samples.take(indices)


def _unmap_pages(array: np.ndarray) -> None:
    """Drop the resident pages of a memory map, where the system can. They are read again from its cache or the file."""
    pages = getattr(array, "_mmap", None)
    if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


class ShardArrays:
    """Data set in two memory-mapped arrays, converted to the types of training when taken."""

    def __init__(self, x: np.ndarray, y: np.ndarray, scale: float | None = None):
        self._x, self._y, self._scale = x, y, scale

    def __len__(self) -> int:
        return len(self._x)

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = self._x[indices]
        x = _typed(x) if self._scale is None else x.astype(np.float32) * np.float32(self._scale)
        return x, _typed(self._y[indices])


def _typed(array: np.ndarray) -> np.ndarray:
    if not is_real(array):
        raise ValueError(f"shard: expected real numbers, found {array.dtype}")
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


class ShardIndex:
    """Contents of a sharded data set's folder, checked against the headers and sizes of its files.

    ValueError names the entry of the index that is missing or wrong.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            facts = json.loads((folder / INDEX).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}: expected a sharded data set with a file {INDEX}: {error}") from error
        self._facts = facts if isinstance(facts, dict) else {}
        self.kind = self._expect("kind", lambda kind: kind in KINDS, f"one of {', '.join(KINDS)}")
        self.outputs: int = self._expect(
            "outputs", lambda count: type(count) is int and count > 0, "an integer above 0"
        )
        scale = self._expect("scale", lambda scale: isinstance(scale, float | int | None), "a number")
        self.scale = None if scale is None else float(scale)
        self._shards = {
            part: self._expect(part, lambda some: isinstance(some, list) and some, "a list of shards")
            for part in ("train", "test")
        }

    def arrays(self, part: str) -> ConcatDataset:
        """Samples of the part "train" or "test". All shards must have samples of one shape and kind of number."""
        first = None
        for number in range(len(self._shards[part])):
            x, y = self._map(part, number, "x"), self._map(part, number, "y")
            if len(x) != len(y):
                raise ValueError(f"{self._name(part, number)}: x has {len(x)} samples, y has {len(y)}")
            if (y.dtype.kind == "f") != (self.kind == "values") or (self.kind == "classes" and y.ndim != 1):
                raise ValueError(f"{self._name(part, number)}: y: expected {self.kind}, found {y.dtype} of {y.shape}")
            # another shape would fail in the middle of an epoch, when the shard is read
            form = x.shape[1:], x.dtype.kind == "f", y.shape[1:]
            first = first or form
            if form != first:
                raise ValueError(
                    f"{self._name(part, number)}: expected samples as of shard 0, found x of {x.shape[1:]}"
                )
        return self._concatenated(part, partial(self._load_arrays, part))

    def _load_arrays(self, part: str, number: int) -> MappedSamples:
        x, y = self._map(part, number, "x"), self._map(part, number, "y")
        return MappedSamples(ShardArrays(x, y, self.scale), (x, y))

    def tokens(self, part: str, windows: Callable[[np.ndarray], Dataset]) -> ConcatDataset:
        """Windows of the tokens of a part, each shard cut by ``windows(vector)``."""

        def load(number: int) -> MappedSamples:
            vector = self._map(part, number, "x")
            if vector.ndim != 1 or vector.dtype.kind not in "iu":
                found = f"{vector.dtype} of shape {vector.shape}"
                raise ValueError(f"{self._name(part, number)}: expected a vector of integers, found {found}")
            return MappedSamples(windows(vector), [vector])

        return self._concatenated(part, load)

    def _concatenated(self, part: str, load: Callable[[int], MappedSamples]) -> ConcatDataset:
        sizes, most = list[int](), list[int]()
        for number in range(len(self._shards[part])):
            shard = load(number)
            sizes.append(len(shard))
            most += [] if shard.most is None else [shard.most]
        return ConcatDataset(sizes, load, most=min(most, default=None))

    def _map(self, part: str, number: int, which: str) -> np.ndarray:
        """Memory map of a file of a shard."""
        entry, name = self._shards[part][number], self._name(part, number)
        if not isinstance(entry, dict) or not isinstance(entry.get(which), str):
            raise ValueError(f"{name}: expected the name of a file as {which}, found {entry!r}")
        path = self.folder / entry[which]
        try:
            if path.suffix == ".bin":
                return np.memmap(path, np.dtype(entry.get("dtype")), "r")
            array: np.ndarray = np.load(path, mmap_mode="r")
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{name}: {which} cannot be mapped: {error}") from error
        if array.ndim == 0 or array.dtype.kind not in "biuf":
            raise ValueError(f"{name}: {which}: expected real numbers, found {array.dtype} of shape {array.shape}")
        return array

    def _name(self, part: str, number: int) -> str:
        return f"{self.folder}: shard {number} of {part}"

    def _expect(self, name: str, valid: Callable[[Any], Any], expected: str) -> Any:
        value = self._facts.get(name)
        if not valid(value):
            raise ValueError(f"{self.folder / INDEX}: {name}: expected {expected}, found {value!r}")
        return value


class ShardWriter:
    """Writer of a sharded data set: a file or two for each `add`, and the index at the end of the ``with`` block.

    `folder` is created. `kind` and `scale` are written to the index. `outputs` is by default the largest class or
    token plus one, or the number of values. Data of any size can be written, a shard at a time.
    """

    def __init__(self, folder: Path, kind: str, outputs: int | None = None, scale: float | None = None):
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, found {kind!r}")
        self._folder, self._kind, self._outputs, self._most = Path(folder), kind, outputs, 0
        self._scale = scale
        self._shards: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
        self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, part: str, x: np.ndarray, y: np.ndarray | None = None) -> None:
        """Write a shard of the part "train" or "test": samples x and y, or a vector of tokens."""
        stem, x = f"{part}-{len(self._shards[part]):05}", np.asarray(x)
        if (y is None) != (self._kind == "tokens"):
            raise ValueError(f"y: expected {'none' if y is not None else 'targets'} with {self._kind}")
        if y is None:
            if x.dtype.kind not in "iu":
                raise ValueError(f"x: expected tokens that are integers, found {x.dtype}")
            x.tofile(self._folder / f"{stem}.bin")
            self._shards[part].append({"x": f"{stem}.bin", "dtype": x.dtype.str})
            # a model needs an output for the largest token
            self._most = max(self._most, int(x.max(initial=0)) + 1)
            return
        y = np.asarray(y)
        if len(x) != len(y):
            raise ValueError(f"x has {len(x)} samples, y has {len(y)}")
        if self._kind != "values" and y.dtype.kind not in "iub":
            raise ValueError(f"y: expected classes that are integers, found {y.dtype}")
        names = {"x": f"{stem}.x.npy", "y": f"{stem}.y.npy"}
        for which, array in (("x", x), ("y", y)):
            np.save(self._folder / names[which], array)
        self._shards[part].append(names)
        here = int(np.prod(y.shape[1:])) if self._kind == "values" else int(y.max(initial=0)) + 1
        self._most = max(self._most, here)

    def close(self) -> None:
        facts: dict[str, Any] = {"kind": self._kind, "outputs": self._outputs or self._most, **self._shards}
        if self._scale is not None:
            facts["scale"] = self._scale
        (self._folder / INDEX).write_text(json.dumps(facts, indent=1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
