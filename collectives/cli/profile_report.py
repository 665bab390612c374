"""Report of a profile: calls of all ranks side by side, as a table, as numbers in a file, and as a trace."""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from collectives.benchmark import reports, traces
from collectives.cli.call_profile import COLUMNS, CallKind, CallProfile, Sample
from collectives.communicator import PREDEFINED
from collectives.units import format_bytes

PATIENCE = 10.0
"""Seconds that ranks wait at the end of the program for all to come."""

SHOWN = 20
"""Lines of the table."""

TRACED = 20_000
"""Calls of each rank in the trace: the last ones."""

LATE = 0.5
"""Least share of a line's waiting time for a rank to be named as the late one."""


class RankCalls(NamedTuple):
    """Profile of one rank, sent to rank 0. `calls` has shape (calls, 4), `COLUMNS`, by the clock of rank 0."""

    rank: int
    kinds: list[CallKind]
    calls: np.ndarray
    samples: list[Sample]
    left_out: int


class Line:
    """Calls of one line of the program, by one algorithm: sums over ranks."""

    def __init__(self) -> None:
        self.calls = self.nbytes = 0
        self.seconds = self.waiting = 0.0
        self.late: defaultdict[int, float] = defaultdict(float)
        self.ratios: list[float] = []

    def numbers(self, ranks: int) -> dict[str, Any]:
        """Numbers for the file: seconds are means over ranks, calls and bytes sums."""
        rank, most = max(self.late.items(), key=lambda item: item[1], default=(None, 0.0))
        is_late = self.waiting > 0 and most >= LATE * self.waiting
        return {
            "calls": self.calls,
            "bytes": self.nbytes,
            "seconds": self.seconds / ranks,
            "waiting": self.waiting / ranks,
            "late_rank": rank if is_late else None,
            "late_share": most / self.waiting if self.waiting else 0.0,
            "of_native": median(self.ratios) if self.ratios else None,
        }


def report(profile: CallProfile, numbers: Path, trace: Path) -> None:
    """Print the table on rank 0, and write the files from it. Collective. Ranks that do not come are left out."""
    comm = PREDEFINED["COMM_WORLD"]
    everyone, end = comm.Ibarrier(), time.monotonic() + PATIENCE
    while not everyone.Test():
        if time.monotonic() > end:
            print("chorus run: no profile: a rank has left the program", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(0.01)
    profile.note(None)
    ahead = round(1e9 * traces.offset(comm))
    calls = np.frombuffer(profile.calls, np.int64).reshape(-1, len(COLUMNS)).copy()
    calls = calls[calls[:, 3] > 0]
    calls[:, 2:] -= ahead
    mine = RankCalls(comm.Get_rank(), profile.kinds, calls, profile.samples, profile.left_out)
    found = comm.gather(mine)
    if found is None:
        return
    lines = lines_of(found)
    rows = [{**_of_key(key), **line.numbers(len(found))} for key, line in lines.items()]
    rows.sort(key=lambda row: -row["seconds"])
    left_out = sum(one.left_out for one in found)
    reports.write(numbers, {"ranks": len(found), "calls_left_out": left_out, "lines": rows})
    trace.parent.mkdir(parents=True, exist_ok=True)
    traces.write(trace, entries(found), ranks=str(len(found)))
    sys.stdout.flush()
    print("\n".join([*table(rows), f"{numbers} and {trace} written; ui.perfetto.dev opens the second"]), flush=True)


def _of_key(key: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(("site", "collective", "form", "algorithm"), key, strict=True))


def lines_of(found: Sequence[RankCalls]) -> Mapping[tuple[str, ...], Line]:
    """Lines of all ranks by site, collective, form and algorithm."""
    lines: defaultdict[tuple[str, ...], Line] = defaultdict(Line)
    starts = latest(found)
    for one in found:
        for kind, turn, started, ended in one.calls.tolist():
            about = one.kinds[kind]
            line = lines[_key(about)]
            line.calls += 1
            line.nbytes += about.nbytes
            line.seconds += 1e-9 * (ended - started)
            last, rank = starts[about.communicator, about.channel, turn]
            if last > started:
                waited = 1e-9 * (min(last, ended) - started)
                line.waiting += waited
                line.late[rank] += waited
        for sample in one.samples:
            lines[_key(one.kinds[sample.kind])].ratios.append(sample.ours / sample.native)
    return lines


def _key(kind: CallKind) -> tuple[str, ...]:
    return kind.site, kind.collective, kind.form, kind.algorithm


def latest(found: Iterable[RankCalls]) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Start of the last rank in each call, and that rank, by communicator, channel and turn."""
    last: dict[tuple[int, int, int], tuple[int, int]] = {}
    for one in found:
        for kind, turn, started, _ in one.calls.tolist():
            key = one.kinds[kind].communicator, one.kinds[kind].channel, turn
            last[key] = max(last.get(key, (started, one.rank)), (started, one.rank))
    return last


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Table of the lines that take most time, for people to read."""
    heads = "seconds", "waiting", "late", "calls", "bytes", "of native", "collective", "line"
    cells = [heads, *map(_cells, rows[:SHOWN])]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        aligned = [cell.rjust(width) for cell, width in zip(row[:6], widths)]
        yield "  ".join([*aligned, row[6].ljust(widths[6]), row[7]])
    if len(rows) > SHOWN:
        yield f"and {len(rows) - SHOWN} lines more"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    late = "" if row["late_rank"] is None else f"rank {row['late_rank']}"
    ratio = "" if row["of_native"] is None else f"{row['of_native']:.2f}"
    name = row["collective"] + {"blocking": "", "non-blocking": ", non-blocking"}.get(row["form"], ", persistent")
    place = os.path.relpath(row["site"]) if os.path.isabs(row["site"]) else row["site"]
    numbers = f"{row['seconds']:.3f}", f"{row['waiting']:.3f}", late, str(row["calls"]), format_bytes(row["bytes"])
    return *numbers, ratio, f"{name} ({row['algorithm']})", place


def entries(found: Sequence[RankCalls]) -> Iterator[traces.Entry]:
    """Trace entries of the last calls of each rank, with times since the earliest of them."""
    yield from traces.names([0] * len(found))
    begin = min((one.calls[-TRACED:, 2].min() for one in found if len(one.calls)), default=0)
    for one in found:
        for kind, turn, started, ended in one.calls[-TRACED:].tolist():
            about = one.kinds[kind]
            more = {"line": about.site, "bytes": about.nbytes, "algorithm": about.algorithm, "turn": turn}
            times = 1e-9 * (started - begin), 1e-9 * (ended - begin)
            yield traces.span(one.rank, 0, about.collective, about.form, *times, **more)
