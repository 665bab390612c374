"""Metrics file: one JSON object per line, written during training and continued after a restart.

The file has complete lines only: a write is of whole lines, and what a full disk cuts is removed.
"""

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO


class Metrics:
    """Metrics of a training run: lines in memory and, if given, in the JSON-lines file `path`, continued after `step`.

    Of an earlier run's file, lines after `step`, a summary and an incomplete line are dropped, at step 0 all lines.

    Attributes
    ----------
    lines : list of dict
        Rows. Infinities and NaN are None, as JSON lacks them.
    problem : OSError or None
        Error of the last write. The next line tries again.
    """

    def __init__(self, path: Path | None, step: int):
        before = read(path) if path and step else []
        self.lines = [line for line in before if line.get("step", step + 1) <= step and not line.get("final")]
        self.problem: OSError | None = None
        self._file: BinaryIO | None = None
        self._waiting = b""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.new")
            self.copy(new)
            os.replace(new, path)
            self._file = path.open("ab", buffering=0)

    def add(self, line: dict[str, Any]) -> None:
        """Append a line to memory and file. A write error is kept in `problem` and not raised."""
        self.lines.append({name: _plain(value) for name, value in line.items()})
        if self._file is not None:
            self._waiting += json.dumps(self.lines[-1], allow_nan=False).encode() + b"\n"
            try:
                _append(self._file, self._waiting)
                self._waiting, self.problem = b"", None
            except OSError as error:
                self.problem = error

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self.problem = self.problem or error
            self._file = None

    def copy(self, path: Path) -> None:
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")

    def complete(self) -> None:
        if self.problem is not None:
            raise self.problem


def _append(file: BinaryIO, lines: bytes) -> None:
    """Append all bytes to the file. If only some fit, truncate it to its old size and raise OSError."""
    about = os.fstat(file.fileno())
    if file.write(lines) != len(lines):
        if stat.S_ISREG(about.st_mode):
            os.ftruncate(file.fileno(), about.st_size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file as `parse` does. An empty list if the file does not exist."""
    return parse(path.read_bytes()) if path.is_file() else []


def parse(data: bytes) -> list[dict[str, Any]]:
    """JSON objects, one a line, up to the first line that is none."""
    lines: list[dict[str, Any]] = []
    for text in data.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict):
            break
        lines.append(line)
    return lines
