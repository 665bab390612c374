"""File in memory (tmpfs) with one generation of a rank's training state. It outlives the process that writes it.

    header | arrays, one after another | facts as JSON, and zeros to a multiple of 8 bytes

A process may be killed at any instruction: the step in the header is -1 while the rest changes, and is written last.
"""

import errno
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from collectives.units import format_bytes
from parallel.runtime.vector_memory import to_host
from quant.kernels import array_namespace

MAGIC = b"chorus 1"
ROOM, ROOM_OF_SLICE = 1 << 16, 1 << 9
"""Bytes for facts, and besides for each slice of a tensor: settings, names, ranges and counters."""

HEADER = np.dtype(
    [
        ("magic", "S8"),  # format and its version
        ("step", "<i8"),  # steps done, -1 while the state is not whole
        ("arrays", "<i8"),  # bytes of the arrays
        ("facts", "<i8"),  # bytes of the facts, before the zeros
        ("checksum", "<u8"),  # sum of the 64-bit words of arrays and facts, and of the numbers above
    ]
)
WORD = 8


def padded(nbytes: int) -> int:
    """Smallest multiple of 8 that is at least `nbytes`."""
    return -(-nbytes // WORD) * WORD


class StateSegment:
    """Memory-mapped file with a state. OSError if it cannot be created, or is no such file.

    Parameters
    ----------
    path : Path
        File in a tmpfs.
    capacity : int, optional
        Bytes of arrays and facts together. A file of another size is replaced, and all its memory is reserved. Without
        it the file must exist.
    """

    def __init__(self, path: Path, capacity: int | None = None):
        self.path = path
        if capacity is not None and (not path.exists() or path.stat().st_size != HEADER.itemsize + capacity):
            _reserve(path, HEADER.itemsize + capacity)
        with path.open("r+b") as file:
            if (size := os.fstat(file.fileno()).st_size) < HEADER.itemsize:
                raise OSError(errno.EINVAL, "it is shorter than its header", str(path))
            self.memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        self._header = self.memory[: HEADER.itemsize].view(HEADER)[0]
        self._body = self.memory[HEADER.itemsize :]

    @property
    def step(self) -> int:
        """Step of the state. -1 if there is none. The checksum is not verified."""
        return int(self._header["step"]) if self._header["magic"] == MAGIC else -1

    def clear(self) -> None:
        """Mark the state as not whole."""
        self._header["step"] = -1

    def write(self, step: int, arrays: Iterable[Any], facts: Mapping[str, Any]) -> None:
        """Replace the state. OSError if `facts` have become too long."""
        self.clear()
        at = 0
        for array in arrays:
            values = to_host(array).reshape(-1).view(np.uint8)
            self._body[at : at + len(values)] = values
            at += len(values)
        text = json.dumps(facts).encode()
        end = at + len(text)
        if padded(end) > len(self._body):
            room = f"{len(self._body) - at} bytes of {self.path} are left for counters and settings"
            raise OSError(f"--survive: {room}, expected {len(text)}")
        self._body[at:end] = np.frombuffer(text, np.uint8)
        self._body[end : padded(end)] = 0
        header = self._header
        header["magic"], header["arrays"], header["facts"] = MAGIC, at, len(text)
        header["checksum"] = self._sum(step)
        header["step"] = step

    def receive(self, sent: np.ndarray) -> None:
        """Publish a state that has arrived in `memory` behind a header on its own, `sent`."""
        header = sent.view(HEADER)[0]
        self.memory[: HEADER.itemsize] = sent
        self.clear()
        self._header["step"] = header["step"]

    def is_whole(self) -> bool:
        """True if the state is complete and its checksum right."""
        header, step = self._header, self.step
        sizes = [int(header["arrays"]), int(header["facts"])]
        if step < 0 or min(sizes) < 0 or padded(sum(sizes)) > len(self._body):
            return False
        return bool(header["checksum"] == self._sum(step))

    def facts(self) -> dict[str, Any]:
        """Facts of a whole state."""
        start = int(self._header["arrays"])
        found: dict[str, Any] = json.loads(bytes(self._body[start : start + int(self._header["facts"])]))
        return found

    def read(self, arrays: Iterable[Any]) -> None:
        """Copy a whole state into arrays of the same types and sizes, in the order of `write`."""
        at = 0
        for array in arrays:
            values = self._body[at : at + array.nbytes].view(array.dtype)
            array[...] = array_namespace(array).asarray(values)
            at += array.nbytes

    def _sum(self, step: int) -> Any:
        """Checksum of what the header describes, modulo 2**64."""
        sizes = self._header["arrays"], self._header["facts"]
        words = self._body[: padded(int(sum(sizes)))].view(np.uint64)
        return np.add.reduce(np.concatenate([[np.add.reduce(words)], np.array([step, *sizes], np.uint64)]))


def _reserve(path: Path, size: int) -> None:
    """Create a file in memory, with all its pages. An OSError with the sizes if there is no room for it."""
    path.unlink(missing_ok=True)
    free = os.statvfs(path.parent)
    with path.open("xb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            path.unlink()
            if error.errno != errno.ENOSPC:
                raise
            left = format_bytes(free.f_bavail * free.f_frsize)
            raise OSError(f"expected {format_bytes(size)} more in {path.parent}, found {left}") from error
