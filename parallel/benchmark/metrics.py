"""A file of metrics: a JSON object a line, written as training goes on, and taken up again after a restart."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TextIO


class Metrics:
    """The file, and its lines in memory.

    Parameters
    ----------
    path : Path, optional
        None keeps the lines in memory only.
    step : int
        Where the training stands. Lines of later steps, of its end, and half a line, are what a run wrote that did not
        come to its end or will go further now: they go. At 0 nothing is kept.

    Attributes
    ----------
    lines : list of dict
        Numbers that are not finite, which JSON has not, are None.
    problem : OSError or None
        Why the file, though not the lines, has ended early.
    """

    def __init__(self, path: Path | None, step: int):
        before = read(path) if path and step else []
        self.lines = [line for line in before if line.get("step", step + 1) <= step and not line.get("final")]
        self.problem: OSError | None = None
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.new")
            new.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")
            os.replace(new, path)
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def add(self, line: dict[str, Any]) -> None:
        """Write a line. A file that cannot be written any more is no reason to end a training: see `problem`."""
        self.lines.append({name: _plain(value) for name, value in line.items()})
        if self._file is not None:
            try:
                self._file.write(json.dumps(self.lines[-1], allow_nan=False) + "\n")
            except OSError as error:
                self.problem = error
                self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                self.problem = self.problem or error

    def copy(self, path: Path) -> None:
        """Write all lines into another file."""
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")

    def complete(self) -> None:
        """Raise the `problem`, if there was one."""
        if self.problem is not None:
            raise self.problem


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file up to the first that is none; nothing if there is no file."""
    lines: list[dict[str, Any]] = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines
