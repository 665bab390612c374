"""The record of this process: always on, unless the system refuses the memory.

It is in a memory file, which others find by the descriptor in /proc as long as the process lives, or in a file of the
folder ``CHORUS_RECORD``, which outlives it.
"""

import os
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.engine.extension import set_record
from collectives.engine.instructions import CALL_RECORD, CALLS_KEPT, CallState
from collectives.engine.recorder import AFTER_NUMBER, Recorder
from collectives.runtime.record.layout import MAGIC, NAME, NBYTES, OUTSIDE, VERSION, RankState, parts
from collectives.runtime.record.reader import is_active
from collectives.runtime.record.source_line import caller_with_text
from collectives.transport.memory.memory_file import create_file, map_file

FOLDER = "CHORUS_RECORD"

WATCH = "chorus line watch"
"""Name of the thread that looks at other ranks in the place of one that waits in the MPI."""


class Record:
    """Record of this process in `memory`, whose entries the engine writes."""

    def __init__(self, memory: np.ndarray) -> None:
        self._header, self.entries = parts(memory)
        self._seen_at = 0, False, 0, ""  # last call, True if it had ended, and stack and line, at the last look
        wall, now = time.time_ns(), time.monotonic_ns()
        world = MPI.COMM_WORLD
        values = {
            "magic": MAGIC, "version": VERSION, "calls_kept": CALLS_KEPT, "state": RankState.RUNS,
            "rank": world.Get_rank(), "size": world.Get_size(), "pid": os.getpid(), "wall_offset": wall - now,
            "opened": now, "job": job_name(), "host": os.uname().nodename, "command": _command(),
        }  # fmt: skip
        for name, value in values.items():
            self._header[name] = value.encode("ascii", "replace") if isinstance(value, str) else value
        self._last = self._header["last"].data  # an element of it is read faster than NumPy's
        set_record(self._header["last"], self.entries)
        self._recorder = Recorder()  # for waits, which no engine runs
        self._recorder.set_record(self._header["last"], self.entries)
        self._turns = {-1 - world.Get_rank(): np.zeros(1, np.int64)}

    def begin_wait(self, name: str, what: str, peer: int = -1, began: int = 0, meeting: int | None = None) -> int:
        """Note a wait outside of collectives for a rank of MPI.COMM_WORLD, since a time. Returns the entry's number.

        A `meeting` is one of all ranks, with the number of its place, where they count meetings.
        """
        place = -1 - int(self._header["rank"][0]) if meeting is None else meeting
        values = {"collective": name, "algorithm": what, "communicator": place, "channel": OUTSIDE, "peer": peer}
        entry = np.zeros(1, CALL_RECORD)
        for field, value in (values | dict.fromkeys(("nbytes", "root", "round"), -1)).items():
            entry[field] = value
        turns = self._turns.setdefault(place, np.zeros(1, np.int64))
        number = self._recorder.start(entry.tobytes()[AFTER_NUMBER:], turns.data, None)
        if began:
            self.entries["started"][number % CALLS_KEPT] = began
        return number

    def end_wait(self, number: int, is_left: bool = False) -> None:
        """Note the end of a wait."""
        self._recorder.end(number, CallState.WAS_LEFT if is_left else CallState.HAS_ENDED)

    def end(self, error: BaseException | None) -> None:
        """Note the end of the program, by an uncaught exception or in order."""
        if error is not None:
            self.note_error(error)
        self._header["state"] = RankState.HAS_LEFT if error is None else RankState.HAS_RAISED

    @property
    def has_ended(self) -> bool:
        """True after `end`."""
        return bool(self._header["state"][0] != RankState.RUNS)

    def note_error(self, error: BaseException) -> None:
        """Note an exception that has ended the program, a thread, or a function called at the exit."""
        self._header["last_words"] = f"{type(error).__name__}: {error}".partition("\n")[0].encode()[:1024]

    def at_line(self, line: str, stack: int = 0) -> None:
        """Note the line that the program is at, and a number that differs between stacks."""
        now, before, self._seen_at = time.monotonic_ns(), self._seen_at, (self.last, self.active is None, stack, line)
        if before != self._seen_at:
            self._header["line_moved"] = now if before[:2] == self._seen_at[:2] else 0
            self._header["line_looks"] = 0
        self._header["line_looks"] += 1
        self._header["line"], self._header["line_seen"] = line.encode()[:512], now

    @property
    def last(self) -> int:
        """Number of the last call."""
        number: int = self._last[0]
        return number

    @property
    def active(self) -> Any:
        """Last call, if it has not ended. None otherwise."""
        entry = self.entries[self.last % CALLS_KEPT]
        return entry if entry["number"] and is_active(entry) else None

    def stall(self, number: int, round: int, peer: int) -> None:
        """Note what the active call with a number has waited for long, a round and a rank, and the line it is at."""
        entry = self.entries[number % CALLS_KEPT]
        if number and entry["number"] == number:
            entry["round"], entry["peer"] = round, peer
        if threading.current_thread().name != WATCH:
            self.at_line(caller_with_text())


def job_name() -> str:
    """Name of this launch, the same for all its ranks on a node: by Slurm's step, PMIx, or the process above."""
    step = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return ".".join(step) if all(step) else os.environ.get("PMIX_NAMESPACE") or str(os.getppid())


def _command() -> str:
    program = [getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0], *sys.argv[1:]]
    return shlex.join(map(str, program))


def _memory() -> np.ndarray:
    """Memory of a new record. OSError or AttributeError if the system refuses."""
    folder = os.environ.get(FOLDER, "")
    if folder:
        path = Path(folder) / f"{job_name()}-{MPI.COMM_WORLD.Get_rank()}.{NAME}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, NBYTES)
    else:
        descriptor = create_file(NBYTES, NAME)
    return map_file(descriptor, 0, NBYTES)  # others find it by the open descriptor


_current: Record | None = None
_is_opened = False


def record() -> Record | None:
    """Record of this process, opened by the first call. None if the system refuses, and in a forked process."""
    global _current, _is_opened
    if not _is_opened:
        _is_opened = True
        try:
            _current = Record(_memory())
        except (OSError, AttributeError) as error:
            if os.environ.get(FOLDER):
                print(f"chorus: {FOLDER}: no record is kept ({error})", file=sys.stderr)
    return _current


def _forget() -> None:
    """In a forked process: it has no part in the record, and its calls are noted in memory of its own."""
    global _current
    if _current is not None:
        _current = None
        set_record(np.zeros(1, np.int64), parts(np.zeros(NBYTES, np.uint8))[1])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
