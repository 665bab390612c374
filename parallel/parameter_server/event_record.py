"""Files of recorded event orders, one per server, written incrementally. No MPI."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from parallel.parameter_server.event_order import EventEntry

FORMAT = "chorus order 1"


def file_of(path: Path, server: int) -> Path:
    """Path of a server's file.

    >>> file_of(Path("run.order"), 1).name
    'run.order.1'
    """
    return path.with_name(f"{path.name}.{server}")


class EventRecording:
    """Growing record file.

    Parameters
    ----------
    path : Path
        Overwritten; its folder is created.
    facts : mapping
        Plain values that must be equal in a replay.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._file.write(json.dumps({"format": FORMAT, **facts}) + "\n")
        self._written = 0

    def write(self, entries: Sequence[EventEntry]) -> None:
        """Append the new entries of a growing list."""
        self._file.writelines(" ".join(map(str, entry)) + "\n" for entry in entries[self._written :])
        self._file.flush()
        self._written = len(entries)

    def close(self) -> None:
        self._file.close()


def read(path: Path, facts: Mapping[str, Any]) -> list[EventEntry]:
    """Read the file of an `EventRecording`.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is not a record, or of a training with other facts.
    """
    head, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    try:
        there = json.loads(head)
        entries = [EventEntry(*map(int, line.split())) for line in lines]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no record of an order: {error}") from error
    here = json.loads(json.dumps({"format": FORMAT, **facts}))
    for name, value in here.items():
        if not isinstance(there, dict) or there.get(name) != value:
            found = there.get(name) if isinstance(there, dict) else there
            raise ValueError(f"{path} is of another training: {name} is {value} here, and {found} there")
    return entries
