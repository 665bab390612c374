"""Traces in the Trace Event Format of Chrome and Perfetto: a process is a node, a thread a rank.

Times are in microseconds.

(Google, "Trace Event Format". ui.perfetto.dev opens it.)
"""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from mpi4py import MPI

from collectives.analysis import draw
from collectives.engine.instructions import COPY, Kind
from collectives.schedule.steps import Schedule

Entry: TypeAlias = dict[str, Any]

PINGS = 50

LABELS = {
    Kind.SEND: "send",
    Kind.NET_SEND: "send",
    Kind.RECV: "receive",
    Kind.NET_RECV: "receive",
    Kind.CALL: "call",
}


def span(rank: int, node: int, name: str, kind: str, start: float, end: float, **more: Any) -> Entry:
    """Trace entry ("complete event") of one rank's activity from `start` to `end` in seconds."""
    first, last = round(1e9 * start), round(1e9 * end)  # whole nanoseconds, so that rounding keeps spans nested
    times = {"ts": first / 1e3, "dur": (last - first) / 1e3}
    return {"name": name, "cat": kind, "ph": "X", "pid": node, "tid": rank, **times, "args": more}


def names(nodes: Sequence[int], lanes: Sequence[str] = ("",)) -> list[Entry]:
    """Trace entries that label nodes and ranks. With several `lanes` every rank has one thread per lane."""
    entries = [_name("process_name", node, 0, f"node {node}") for node in sorted(set(nodes))]
    for rank, node in enumerate(nodes):
        for index, lane in enumerate(lanes):
            thread = rank * len(lanes) + index
            entries.append(_name("thread_name", node, thread, f"rank {rank}{lane}"))
            entries.append({**_name("thread_sort_index", node, thread, ""), "args": {"sort_index": thread}})
    return entries


def _name(what: str, process: int, thread: int, name: str) -> Entry:
    return {"name": what, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": {"name": name}}


def of_calls(
    title: str,
    rank: int,
    node: int,
    schedule: Schedule,
    count: int,
    begins: Sequence[tuple[int, int]],
    kinds: Sequence[str],
    times: Sequence[float],
) -> list[Entry]:
    """Trace entries of one rank's collective: nested spans for all of it, its rounds, and the rows of a round.

    `begins` are rounds of the schedule and the number of rows before each. `kinds` describe the rows in the order of
    their ends. `times` are the beginnings of the rows, and the end of the last one. `schedule` and `count`, the chunks
    of the vector, label the rounds.
    """
    entries = [span(rank, node, title, "collective", times[0], times[-1])]
    stops = (*(at for _, at in begins[1:]), len(kinds))
    for (index, at), stop in zip(begins, stops):  # on one rank there are no rounds
        steps = "  ".join(draw.step(step, count) for step in schedule[index])
        entries.append(span(rank, node, f"round {index}", "round", times[at], times[stop], steps=steps))
    entries += [span(rank, node, kind, "call", times[at], times[at + 1], call=at) for at, kind in enumerate(kinds)]
    return entries


def kind_of(row: Any) -> str:
    """Label of a row of a program: send, receive, reduce, copy, wait or call."""
    kind = Kind(row["kind"])
    if kind == Kind.LOCAL:
        return "copy" if row["reduction"] == COPY else "reduce"
    return LABELS.get(kind, "wait")


def offset(comm: MPI.Intracomm) -> float:
    """Seconds that this rank's clock is ahead of rank 0's, from the fastest of many round trips. Collective."""
    rank, ahead = comm.Get_rank(), 0.0
    for peer in range(1, comm.Get_size()):
        if rank == 0:
            best = (float("inf"), 0.0)
            for _ in range(PINGS):
                left = time.perf_counter()
                there = comm.sendrecv(None, peer, source=peer)
                back = time.perf_counter()
                best = min(best, (back - left, there - (left + back) / 2))
            comm.send(best[1], peer)
        elif rank == peer:
            for _ in range(PINGS):
                comm.recv(source=0)
                comm.send(time.perf_counter(), 0)
            ahead = comm.recv(source=0)
    return ahead


def write(path: Path, entries: Iterable[Entry], **about: Any) -> None:
    trace = {"traceEvents": list(entries), "displayTimeUnit": "ns", "otherData": about}
    path.write_text(json.dumps(trace, indent=0) + "\n")
