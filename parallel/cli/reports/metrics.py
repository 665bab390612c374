"""Metrics of a training: JSON lines, a CSV table and TensorBoard's event files, continued after a restart.

Files have complete lines only: a write is of whole lines, and what a full disk cuts is removed.
"""

import csv
import errno
import io
import json
import math
import os
import stat
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from collectives.benchmark.reports import check_folder


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
        before = self._read(path) if path and step else []
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
            self._waiting += self._encoded(self.lines[-1])
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
        path.write_bytes(self._head + b"".join(map(self._encoded, self.lines)))

    def complete(self) -> None:
        if self.problem is not None:
            raise self.problem

    _head = b""

    @staticmethod
    def _read(path: Path) -> list[dict[str, Any]]:
        return read(path)

    @staticmethod
    def _encoded(line: dict[str, Any]) -> bytes:
        return json.dumps(line, allow_nan=False).encode() + b"\n"


COLUMNS = (
    *("step", "epoch", "loss", "rate", "norm", "skipped", "samples", "seconds", "communication"),
    *("test_loss", "test_accuracy", "bits_per_byte", "final"),
)
"""Columns of a CSV table. The row of the last test is `final`."""


class CsvMetrics(Metrics):
    """Metrics as a CSV table with `COLUMNS`. Values that a step does not have are empty."""

    _head = (",".join(COLUMNS) + "\n").encode()

    @staticmethod
    def _read(path: Path) -> list[dict[str, Any]]:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        rows = [row for row in csv.DictReader(line for line in lines if line.endswith("\n")) if row["step"]]
        return [row | {"step": json.loads(row["step"])} for row in rows]

    @staticmethod
    def _encoded(line: dict[str, Any]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n").writerow(line)
        return text.getvalue().encode()


class TensorBoardMetrics(Metrics):
    """Metrics as scalars in TensorBoard's event files in a folder. Those after `step` are marked as discarded."""

    def __init__(self, folder: Path | None, step: int):
        super().__init__(None, step)
        self._writer = None
        if folder is not None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def add(self, line: dict[str, Any]) -> None:
        if self._writer is None:
            return
        try:
            for name, value in line.items():
                if type(value) in (int, float) and math.isfinite(value) and name != "step":
                    self._writer.add_scalar(name, value, line["step"])
            self._writer.flush()
        except OSError as error:
            self.problem = error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def check_tensorboard(folder: Path) -> None:
    """Create a folder for event files. OSError if that fails, ValueError without the library tensorboardX."""
    try:
        import_module("tensorboardX")
    except ImportError as error:
        text = "event files need the library tensorboardX: pip install 'chorus-mpi[tensorboard]'"
        raise ValueError(text) from error
    check_folder(folder)


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
