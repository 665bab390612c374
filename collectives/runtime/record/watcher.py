"""Watch over long waits: who is waited for, and why.

A rank that has waited long looks at the records of the ranks it waits for: one that has died or left the program ends
the wait by an error. If nothing moves for `patience` seconds, one rank of the node prints what all its ranks do.

A rank that computes for long, or hangs outside of calls, has a thread that notes its source line now and then.
"""

import os
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache

from mpi4py import MPI

from collectives.errors import PeerFailed, PeerLeft
from collectives.runtime.record.conditions import report
from collectives.runtime.record.layout import RankState
from collectives.runtime.record.reader import RankRecord, open_record, running
from collectives.runtime.record.source_line import caller
from collectives.runtime.record.writer import Record, job_name, record
from collectives.transport.node.peer_watch import has_ended

PATIENCE = 30.0
"""Seconds without progress after which a report is printed; again after 2, 8 and 32 times as many."""

TIMES = (1, 2, 8, 32)

LOOK = 2.0
"""Seconds from one look of the thread at the program's line to the next."""

SETTLED = 0.5
"""Seconds that messages of a rank that has left may take."""

_left_since: dict[int, float] = {}
_reports = 0


def patience() -> float:
    """Seconds of ``CHORUS_PATIENCE``, or `PATIENCE`; 0 or what is no number: no report."""
    text = os.environ.get("CHORUS_PATIENCE", "")
    try:
        return float(text) if text else PATIENCE
    except ValueError:
        return 0.0


@cache
def _record_of(pid: int) -> RankRecord | None:
    return open_record(pid)


def look(label: str, peers: Mapping[int, int], idle: float) -> None:
    """Look at the ranks that a call waits for: `peers` has their processes by rank in the communicator.

    Raises PeerLeft or PeerFailed if one of them makes no more calls. `idle`: seconds without progress.
    """
    for rank, pid in peers.items():
        found = _record_of(pid)
        has_left = found is not None and found.state != RankState.RUNS
        if not has_left and not has_ended(pid):
            _left_since.pop(pid, None)
        elif time.monotonic() - _left_since.setdefault(pid, time.monotonic()) > SETTLED:
            raise _error(label, rank, found if has_left else None)
    _report_if_due(idle)


def _error(label: str, rank: int, found: RankRecord | None) -> PeerLeft | PeerFailed:
    if found is None:
        return PeerFailed(MPI.ERR_OTHER, f"{label}: the process of rank {rank} has died, and this one waits for it")
    how = f" by {found.text('last_words')}" if found.state == RankState.HAS_RAISED else ""
    return PeerLeft(MPI.ERR_OTHER, f"{label}: rank {rank} has left the program{how}, and this one waits for it")


def _report_if_due(idle: float) -> None:
    """Print what the ranks of this node do, on one of those that wait, if it is time."""
    global _reports
    limit = patience()
    due = sum(idle >= limit * times for times in TIMES) if limit else 0
    if due <= _reports:
        _reports = min(due, _reports)
        return
    _reports = due
    ranks = [one for one in running() if one.text("job") == job_name()]
    waiting = [one.rank for one in ranks if len(one.active)]
    if min(waiting, default=-1) == MPI.COMM_WORLD.Get_rank():
        lines = "\n".join(report(ranks, 0, time.monotonic_ns()))
        print(
            f"chorus: nothing has moved for {idle:.0f} s (CHORUS_PATIENCE sets the time)\n{lines}",
            file=sys.stderr,
            flush=True,
        )


def _note_line(found: Record, ident: int) -> None:
    """Note the line of a thread; a function of its own, as frames keep what is in them alive."""
    frame = sys._current_frames().get(ident)
    if frame is not None:
        found.at_line(caller(frame))


class LineWatch(threading.Thread):
    """Thread that notes the line of the main thread, if that has made no call for `LOOK` seconds."""

    def __init__(self) -> None:
        super().__init__(name="chorus line watch", daemon=True)
        self._last = -1

    def run(self) -> None:
        ident = threading.main_thread().ident or 0
        while (found := record()) is not None:
            time.sleep(LOOK)
            if found.last == self._last:
                _note_line(found, ident)
            self._last = found.last


@cache
def start() -> None:
    """Start the thread, once."""
    if record() is not None:
        LineWatch().start()
