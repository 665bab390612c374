"""Records of other processes: found and read without MPI."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives.engine.instructions import CALLS_KEPT
from collectives.runtime.record.layout import MAGIC, NAME, NBYTES, VERSION, RankState, parts


class RankRecord(NamedTuple):
    """Record of one rank, as it was when it was read."""

    header: Any
    calls: np.ndarray
    """The calls that are still kept, the oldest first."""

    @property
    def rank(self) -> int:
        found: int = self.header["rank"].item()
        return found

    @property
    def state(self) -> RankState:
        return RankState(self.header["state"])

    @property
    def is_alive(self) -> bool:
        """True if its process exists on this host."""
        return Path(f"/proc/{self.header['pid']}").exists()

    @property
    def active(self) -> np.ndarray:
        """Calls that have started and not ended."""
        found: np.ndarray = self.calls[self.calls["ended"] == 0]
        return found

    def text(self, field: str) -> str:
        """A field of the header that is text."""
        found: str = self.header[field].decode("ascii", "replace")
        return found


def read_record(path: Path) -> RankRecord:
    """Read a record; ValueError for other files, OSError if it cannot be read."""
    memory = np.fromfile(path, np.uint8, NBYTES)
    if memory.size < NBYTES:
        raise ValueError(f"{path}: expected a record of {NBYTES} bytes, found {memory.size}")
    header, entries = parts(memory)
    if header["magic"][0] != MAGIC or header["version"][0] != VERSION:
        raise ValueError(f"{path}: expected a record of version {VERSION}")
    last = header["last"][0]
    numbers = entries["number"]
    kept = entries[(numbers > last - CALLS_KEPT) & (numbers > 0)]
    return RankRecord(header[0], kept[np.argsort(kept["number"])])


def open_record(pid: int) -> RankRecord | None:
    """Record of a process of this user, whose header changes with it; None if there is none."""
    with suppress(OSError, ValueError):
        for path in _paths(Path(f"/proc/{pid}")):
            memory = np.memmap(path, np.uint8, "r", shape=(NBYTES,))
            header, entries = parts(memory)
            if header["pid"][0] == pid:
                return RankRecord(header[0], entries)
    return None


def running() -> Iterator[RankRecord]:
    """Records of the processes of this user on this host."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # ended meanwhile, or of another user
                if process.stat().st_uid == os.geteuid():
                    yield from _of_process(process)


def _of_process(process: Path) -> Iterator[RankRecord]:
    for path in _paths(process):
        with suppress(OSError, ValueError):
            found = read_record(path)
            if str(found.header["pid"]) == process.name:  # not a child that has inherited the descriptor
                yield found
                return


def _paths(process: Path) -> Iterator[Path]:
    """Descriptors of a process that may be those of records."""
    for entry in (process / "fd").iterdir():
        with suppress(OSError):
            if NAME in os.readlink(entry):
                yield entry


def in_folder(folder: Path) -> list[RankRecord]:
    """Records in a folder of ``CHORUS_RECORD``; ValueError for damaged ones."""
    return [read_record(path) for path in sorted(folder.glob("*.record"))]
