"""A file of metrics: a JSON object a line, written as training goes on, and taken up again after a restart."""

from __future__ import annotations

import json
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
    """

    def __init__(self, path: Path | None, step: int):
        self.lines = [line for line in read(path) if line.get("step", step + 1) <= step] if path and step else []
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.new")
            new.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")
            os.replace(new, path)
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def add(self, line: dict[str, Any]) -> None:
        """Write a line."""
        self.lines.append(line)
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


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
