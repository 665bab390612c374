"""Writer and reader of safetensors files: writes one tensor at a time, reads with the `safetensors` package.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of the header, the header, which is
JSON with the place of every tensor, and the tensors, row by row.
"""

import json
import math
import os
from collections.abc import Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np

from parallel.nn.operator import ArraySpec

CODES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8", "U8": "|u1", "BOOL": "|b1"}
"""NumPy dtypes by their names in the format."""
CODE_OF = {np.dtype(name): code for code, name in CODES.items()}


class SafetensorsWriter:
    """Writer of a new safetensors file; tensors are added in the order of `entries`. `size` counts the bytes written.

    Examples
    --------
    >>> import tempfile
    >>> from safetensors.numpy import load_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.safetensors")
    ...     writer = SafetensorsWriter(path, {"x": ArraySpec((2,), np.dtype(np.float32))})
    ...     writer.add(np.ones(2, np.float32))
    ...     writer.close()
    ...     load_file(path)
    {'x': array([1., 1.], dtype=float32)}
    """

    def __init__(self, path: Path, entries: Mapping[str, ArraySpec]):
        header, place = {}, 0
        for name, entry in entries.items():
            header[name] = {
                "dtype": CODE_OF[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [place, place + entry.nbytes],
            }
            place += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.size, self._hash, self._path = 0, sha256(), path
        self._file = path.open("xb", buffering=0)
        self._write(len(text).to_bytes(8, "little") + text)

    def add(self, values: np.ndarray) -> None:
        """Write the next tensor of `entries`; `values` must have its dtype and number of elements (not checked)."""
        self._write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes written so far, in hexadecimal."""
        return self._hash.hexdigest()

    def _write(self, data: Any) -> None:
        self._hash.update(data)
        data = memoryview(data)
        self.size += len(data)
        while data:  # one call takes 2 GiB at most
            data = data[self._file.write(data) :]

    def close(self, sync: bool = True) -> None:
        """Close the file, flushed to disk (fsync) first if `sync`."""
        try:
            if sync:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def digest_of(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""
    with path.open("rb", buffering=0) as file:
        return path.stat().st_size, file_digest(file, "sha256").hexdigest()


class SafetensorsReader:
    """Reader of a safetensors file; `entries` has shape and dtype of its tensors by name.

    ImportError without the package, ValueError for another file or an element type that is not in `CODES`.
    """

    def __init__(self, path: Path):
        self._file: Any  # its methods have no types
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError("checkpoints are read with safetensors: pip install 'chorus-mpi[train]'") from error
        try:
            self._file = safe_open(path, framework="np")
        except SafetensorError as error:
            raise ValueError(f"{path.name} is no safetensors file: {error}") from error
        self.entries: dict[str, ArraySpec] = {}
        for name in self._file.keys():  # noqa: SIM118 (not a dictionary)
            found = self._file.get_slice(name)
            if found.get_dtype() not in CODES:
                raise ValueError(f"{path.name}: {name} has elements of type {found.get_dtype()}")
            self.entries[name] = ArraySpec(tuple(found.get_shape()), np.dtype(CODES[found.get_dtype()]))

    def tensor(self, name: str) -> np.ndarray:
        """Read a whole tensor by name."""
        values: np.ndarray = self._file.get_tensor(name)
        return values

    def read(self, name: str, start: int, size: int) -> np.ndarray:
        """Read elements `start` to `start + size` of the flattened tensor; loads only the rows that contain them."""
        shape = self.entries[name].shape
        if not shape:
            return self.tensor(name).reshape(-1)[start : start + size]
        width = math.prod(shape[1:])
        first = start // width
        rows: np.ndarray = self._file.get_slice(name)[first : -(-(start + size) // width)]
        return rows.reshape(-1)[start - first * width :][:size]
