"""Watch over long waits: who is waited for, and why.

A rank that has waited long looks at the records of the ranks it waits for: one that has died or left the program ends
the wait by an error. If nothing moves for `patience` seconds, one rank of the node prints what all its ranks do.

Records of ranks on other nodes are asked for over TCP (`far_records`), once a rank has waited long for one of them.

Each rank has a thread that notes the source line of a program that makes no calls, and that reports in the place of a
rank which waits in a collective of the MPI.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from traceback import walk_stack

from mpi4py import MPI

from collectives.errors import PeerFailed, PeerLeft
from collectives.runtime.record.causes import are_at_work, calls_of, causes, different_calls, report, unmatched_call
from collectives.runtime.record.conditions import after, condition
from collectives.runtime.record.far_records import Answers, FarRecords
from collectives.runtime.record.layout import RankState
from collectives.runtime.record.reader import RankRecord, is_active, map_record, running
from collectives.runtime.record.source_line import caller_with_text, is_inside
from collectives.runtime.record.writer import WATCH, Record, job_name, record
from collectives.transport.node.machine import world_ranks
from collectives.transport.node.peer_watch import has_ended
from collectives.transport.waits import explainers

PATIENCE = 30.0
"""Seconds without progress after which a report is printed. Again after 2, 8 and 32 times as many."""

TIMES = (1, 2, 8, 32)

AT_WORK = 8
"""Times as many seconds until the first report if the ranks that are waited for have moved meanwhile, as slow ones."""

LOOK = 1.0
"""Seconds from one look of the thread at the program's line to the next."""

SETTLED = 0.5
"""Seconds that messages of a rank that has left may take."""

_left_since: dict[int, float] = {}
_known: dict[int, RankRecord] = {}
"""Records of ranks of this job by rank in MPI.COMM_WORLD: they remain when a rank has died."""

_far = FarRecords()
_answers: Answers | None = None
_reports = 0


def patience() -> float:
    """Seconds of ``CHORUS_PATIENCE``, or `PATIENCE`. 0 or what is no number: no report."""
    text = os.environ.get("CHORUS_PATIENCE", "")
    try:
        return float(text) if text else PATIENCE
    except ValueError:
        return 0.0


def neighbours() -> Mapping[int, RankRecord]:
    """Records of the ranks of this job on this node, by rank in MPI.COMM_WORLD."""
    if len(_known) < MPI.COMM_WORLD.Get_size():
        for one in running(map_record):
            if one.text("job") == job_name():
                _known.setdefault(one.rank, one)
    return _known


def look(label: str, peers: Mapping[int, tuple[int, int]], idle: float) -> None:
    """Look at the ranks that a call waits for, by rank in the communicator: rank in MPI.COMM_WORLD, and process or 0.

    Raises PeerLeft or PeerFailed if one of them makes no more calls. `idle`: seconds without progress.
    """
    _far.want(world for world, _ in peers.values() if world not in _known)
    for rank, (world, pid) in peers.items():
        found = _known.get(world) or _far.get(world)
        has_left = found is not None and found.state != RankState.RUNS
        has_died = has_ended(pid) if pid else found is not None and not found.is_alive
        if not (has_left or has_died):
            _left_since.pop(world, None)
        elif time.monotonic() - _left_since.setdefault(world, time.monotonic()) > SETTLED:  # its last messages may come
            raise _error(label, rank, world, found, has_left)
    _report_if_due(idle)


def _error(label: str, rank: int, world: int, found: RankRecord | None, has_left: bool) -> PeerLeft | PeerFailed:
    known, now = _all_known(), time.monotonic_ns()
    why = different_calls(list(map(calls_of, known))) if has_left else ""  # then it has left as a consequence
    why = why or next((text for text in causes(known, now) if text.startswith(f"rank {world} ")), "")
    if not why and found is not None:
        why = f"rank {world} {condition(found, now)}"
    how = f"rank {rank} has left the program" if has_left else f"the process of rank {rank} has ended"
    text = f"{label}: {how}, and this one waits for it" + f"\ncause: {why}" * bool(why)
    return PeerLeft(MPI.ERR_OTHER, text) if has_left else PeerFailed(MPI.ERR_OTHER, text)


def current_causes(ended: bool = False) -> list[str]:
    """Sentences on why ranks of this node wait. If this one has `ended`, also on its end."""
    known, now = _all_known(), time.monotonic_ns()
    found, me = causes(known, now), MPI.COMM_WORLD.Get_rank()
    own = [f"rank {me} {condition(one, now)}" for one in known if ended and one.rank == me]
    return found if any(text.startswith(f"rank {me} ") for text in found) else own + found


def current_unmatched_call(communicator: int) -> tuple[str, bool]:
    """Text on a call that only some ranks of this node have made, and True if another one that has goes on.

    Empty if there is none, or if calls differ. This rank is one of the `communicator`, and makes no more calls there.
    """
    mine = MPI.COMM_WORLD.Get_rank()
    ranks = list(map(calls_of, _all_known()))
    ahead, text = (-1, "") if different_calls(ranks) else unmatched_call(ranks, mine, communicator)
    return text, any(one.record.rank == ahead != mine and one.is_well for one in ranks)


def last_call() -> str:
    """Text on the last call of this rank, after a comma. Empty without a record."""
    mine = neighbours().get(MPI.COMM_WORLD.Get_rank())
    return "" if mine is None else after(mine)


def _all_known() -> list[RankRecord]:
    """Records of this node's ranks, and those of others that waits have asked for."""
    here = neighbours()
    return [*here.values(), *(one for one in _far.all() if one.rank not in here)]


def know(comm: MPI.Intracomm, nodes: Sequence[int] | None) -> None:
    """Exchange where ranks answer, if they are on several `nodes`. Collective."""
    global _answers
    if nodes is None:
        return
    if _answers is None and record() is not None:
        with suppress(OSError):  # no socket for this process: it asks others, and does not answer
            _answers = Answers(lambda: neighbours().values())
            atexit.register(_answers.close)  # from then on its thread does not run
    everyone = zip(world_ranks(comm), nodes, comm.allgather(None if _answers is None else _answers.address))
    _far.know({rank: (node, address) for rank, node, address in everyone if rank >= 0})  # not those of another world


def _report_if_due(idle: float) -> None:
    """Print what the ranks of this node do, on the first of those that wait, if it is time."""
    global _reports
    limit = patience()
    due = sum(idle >= limit * times for times in TIMES) if limit else 0
    if due <= _reports:
        _reports = min(due, _reports)  # after progress, the next long wait is reported again
        return
    now, ranks = time.monotonic_ns(), _all_known()
    if idle < AT_WORK * limit and are_at_work(ranks, now - int(1e9 * limit)):
        return
    _reports = due
    due_from = now - 9e8 * limit
    late = [one.rank for one in ranks if any(is_active(call) and call["started"] <= due_from for call in one.calls)]
    if min(late, default=-1) == MPI.COMM_WORLD.Get_rank():
        lines = "\n".join(report(ranks, 0, now))
        print(
            f"chorus: nothing has moved for {idle:.0f} s (CHORUS_PATIENCE sets the time)\n{lines}",
            file=sys.stderr,
            flush=True,
        )


def _note_line(found: Record, ident: int) -> None:
    """Note the line of a thread. A function of its own, as frames keep what is in them alive."""
    frame = sys._current_frames().get(ident)
    if frame is not None:
        stack = hash(tuple((each.f_code.co_filename, each.f_lasti) for each, _ in walk_stack(frame)))
        found.at_line(caller_with_text(frame), stack)


class LineWatch(threading.Thread):
    """Thread that notes the line of the main thread, if that has made no call for `LOOK` seconds.

    A rank in a collective of the MPI, or in a wait of mpi4py for active requests, cannot look at others, so that the
    thread does: `moves()` changes with progress of the requests, and ``stall(idle)`` looks.
    """

    def __init__(self, moves: Callable[[], int], stall: Callable[[float], list[BaseException]]) -> None:
        super().__init__(name=WATCH, daemon=True)
        self._moves, self._stall = moves, stall
        self._state: tuple[int, int] | None = None
        self._since = 0.0

    def run(self) -> None:
        ident = threading.main_thread().ident or 0
        while (found := record()) is not None:
            if _answers is None:
                time.sleep(LOOK)
            else:
                _far.refresh()
                _answers.give(LOOK)
            if not _known:
                neighbours()  # before one of them dies
            state, now = (found.last, self._moves()), time.monotonic()
            if state == self._state:
                self._look(found, ident, now - self._since)
            else:
                self._state, self._since = state, now

    def _look(self, found: Record, ident: int, idle: float) -> None:
        call = found.active
        if call is None:
            _note_line(found, ident)
        elif call["algorithm"].startswith(b"native") or not _is_inside(ident):
            for error in self._stall(idle):
                print(f"chorus: {error}", file=sys.stderr, flush=True)
            _note_line(found, ident)
            _report_if_due(idle)


def _is_inside(ident: int) -> bool:
    """True if a thread runs code of this package, where waits look at other ranks."""
    frame = sys._current_frames().get(ident)
    return frame is not None and is_inside(frame)


@cache
def start(moves: Callable[[], int], stall: Callable[[float], list[BaseException]]) -> None:
    """Start the thread, once. See `LineWatch`."""
    if record() is not None:
        explainers.append(current_causes)
        LineWatch(moves, stall).start()
