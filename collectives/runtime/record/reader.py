"""Records of other processes: found and read without MPI."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives.engine.instructions import CALLS_KEPT
from collectives.runtime.record.layout import MAGIC, NAME, NBYTES, VERSION, RankState, parts
from collectives.transport.memory.memory_file import map_file
from collectives.transport.node.peer_watch import has_ended


class ProcessState(IntEnum):
    """State of a process on another host."""

    LIVES = 0
    STOPPED = 1  # by a signal, or a debugger
    HAS_ENDED = 2
    IS_SILENT = 3  # it does not answer: it is stopped, or its host cannot be reached


class RankRecord(NamedTuple):
    """Record of one rank, in memory that may change with it; `process` is given if that is on another host."""

    header: Any
    entries: np.ndarray
    process: ProcessState | None = None

    @property
    def calls(self) -> np.ndarray:
        """Copy of the calls that are still kept, the oldest first."""
        found = self.entries[(self.entries["number"] > self.header["last"] - CALLS_KEPT) & (self.entries["number"] > 0)]
        ordered: np.ndarray = found[np.argsort(found["number"])]
        return ordered

    @property
    def rank(self) -> int:
        found: int = self.header["rank"].item()
        return found

    @property
    def state(self) -> RankState:
        return RankState(self.header["state"])

    @property
    def is_alive(self) -> bool:
        """True if its process exists."""
        if self.process is not None:
            return self.process != ProcessState.HAS_ENDED
        return not has_ended(int(self.header["pid"]))

    def text(self, field: str) -> str:
        """A field of the header that is text."""
        found: str = self.header[field].decode("utf-8", "replace")
        return found


def is_active(call: Any) -> bool:
    """True if a call has started, and this rank has neither ended nor left it."""
    return bool(call["ended"] == 0)


def _of_memory(memory: np.ndarray, path: Path) -> RankRecord:
    if memory.size < NBYTES:
        raise ValueError(f"{path}: expected a record of {NBYTES} bytes, found {memory.size}")
    header, entries = parts(memory)
    if header["magic"][0] != MAGIC or header["version"][0] != VERSION:
        raise ValueError(f"{path}: expected a record of version {VERSION}")
    return RankRecord(header[0], entries)


def read_record(path: Path) -> RankRecord:
    """Read a record. ValueError for other files, OSError if it cannot be read."""
    return _of_memory(np.fromfile(path, np.uint8, NBYTES), path)


def map_record(path: Path) -> RankRecord:
    """As `read_record`. It changes with that of the process, and remains when that has ended."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        nbytes = min(os.fstat(descriptor).st_size, NBYTES)
        return _of_memory(map_file(descriptor, 0, nbytes), path)
    finally:
        os.close(descriptor)


def running(take: Callable[[Path], RankRecord] = read_record) -> Iterator[RankRecord]:
    """Records of the processes of this user on this host."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # ended meanwhile, or of another user
                if process.stat().st_uid == os.geteuid():
                    yield from _of_process(process, take)


def _of_process(process: Path, take: Callable[[Path], RankRecord]) -> Iterator[RankRecord]:
    for entry in (process / "fd").iterdir():
        with suppress(OSError, ValueError):
            if NAME in os.readlink(entry):
                found = take(entry)
                if str(found.header["pid"]) == process.name:  # not a child that has inherited the descriptor
                    yield found
                    return


def in_folder(folder: Path) -> list[RankRecord]:
    """Records in a folder of ``CHORUS_RECORD``. ValueError for damaged ones."""
    return [read_record(path) for path in sorted(folder.glob(f"*.{NAME}"))]
