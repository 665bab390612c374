"""Files in which servers keep the order of what they did, one of each server, written as it goes on. Knows no MPI."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from parallel.server.order import Entry

FORMAT = "chorus order 1"


def file_of(path: Path, server: int) -> Path:
    """A server's own.

    >>> file_of(Path("run.order"), 1).name
    'run.order.1'
    """
    return path.with_name(f"{path.name}.{server}")


class Recording:
    """A file that grows.

    Parameters
    ----------
    path : Path
        Is overwritten; the folder is made.
    facts : mapping
        What must be the same for the order to mean the same; plain values.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._file.write(json.dumps({"format": FORMAT, **facts}) + "\n")
        self._written = 0

    def write(self, entries: Sequence[Entry]) -> None:
        """Add what is new in a list that only grows."""
        self._file.writelines(" ".join(map(str, entry)) + "\n" for entry in entries[self._written :])
        self._file.flush()
        self._written = len(entries)

    def close(self) -> None:
        """No more comes."""
        self._file.close()


def read(path: Path, facts: Mapping[str, Any]) -> list[Entry]:
    """What a `Recording` has written.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If it is none of ours, or of another training.
    """
    head, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    try:
        there = json.loads(head)
        entries = [Entry(*map(int, line.split())) for line in lines]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no record of an order: {error}") from error
    here = json.loads(json.dumps({"format": FORMAT, **facts}))
    for name, value in here.items():
        if not isinstance(there, dict) or there.get(name) != value:
            found = there.get(name) if isinstance(there, dict) else there
            raise ValueError(f"{path} is of another training: {name} is {value} here, and {found} there")
    return entries
