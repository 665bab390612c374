"""Result rows as a text table, with the columns of OSU's and nccl-tests' output and the MPI's own time."""

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from collectives.benchmark.result_rows import Report, Row
from collectives.units import format_bytes, format_time


def _text(value: Any) -> str:
    if value is None or isinstance(value, (str, int)):
        return "-" if value is None else str(value)
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.1f}"


def _algorithm(row: Row) -> str:
    chosen = row.get("chosen")
    return f"auto:{chosen}" if chosen else str(row["algorithm"])


def _predicted_ratio(row: Row) -> float | None:
    return row["predicted_us"] / row["ours_us"] if row.get("predicted_us") and row["ours_us"] else None


Column = tuple[str, int, str | Callable[[Row], Any]]
"""Title, width (negative: aligned to the left), and the row's field or a function of the row."""

COLUMNS: list[Column] = [
    ("# Size", -10, lambda row: format_bytes(row["bytes"])),
    ("Algorithm", -24, _algorithm),
    ("Ours(us)", 11, "ours_us"),
    ("Native(us)", 11, "native_us"),
    ("Ratio", 7, "ratio"),
    ("algbw(GB/s)", 12, "algbw_gbs"),
    ("busbw(GB/s)", 12, "busbw_gbs"),
    ("predicted", 10, "predicted_us"),
    ("/ ours", 7, _predicted_ratio),
    ("#wrong", 7, "wrong"),
]
FULL: list[Column] = [
    ("Min(us)", 11, "min_us"),
    ("Max(us)", 11, "max_us"),
    ("p99(us)", 11, "p99_us"),
    ("Nat.p99(us)", 12, "native_p99_us"),
    ("Iterations", 11, "iterations"),
]


class TableStyle:
    """Text table of result rows: `full` adds the columns of option -f. Several memories or modes add one each."""

    def __init__(self, full: bool = False, memories: Sequence[str] = (), modes: Sequence[str] = ()) -> None:
        self._varying = [name for name, all in (("memory", memories), ("mode", modes)) if len(all) > 1]
        first, *others = COLUMNS
        varying: list[Column] = [(name.capitalize(), -12, name) for name in self._varying]
        self._columns = [first, *varying, *others, *(FULL if full else [])]
        self._title = ""

    def _line(self, cells: Iterable[str]) -> str:
        widths = [width for _, width, _ in self._columns]
        aligned = [f"{cell:{'<' if width < 0 else '>'}{abs(width)}}" for cell, width in zip(cells, widths, strict=True)]
        return " ".join(aligned).rstrip()

    def heading(self) -> str:
        return self._line(title for title, _, _ in self._columns)

    def line(self, row: Row) -> str:
        return self._line(_text(row.get(at) if isinstance(at, str) else at(row)) for _, _, at in self._columns)

    def title(self, row: Row) -> str:
        """Comment line above a block of rows: the properties that all its rows share and that have no column."""
        words = [row["collective"], row["dtype"]]
        words += [] if "mode" in self._varying else [row.get("mode", "blocking")]
        words += [] if "memory" in self._varying else [f"{row['memory']} memory"]
        return f"# {', '.join(words)}{', in place' if row.get('in_place') else ''}"

    def lines(self, rows: Iterable[Row]) -> Iterator[str]:
        """Format rows as lines of text, with a new title and heading where the title changes."""
        for row in rows:
            if self._title != (title := self.title(row)):
                self._title = title
                yield from ("", title, self.heading())
            yield self.line(row)


def model_errors(rows: list[Row]) -> list[str]:
    """Comment line on how well timed messages predicted rows above 64 KiB. None without predictions."""
    ratios = [_predicted_ratio(row) for row in rows if row["bytes"] > 1 << 16]
    errors = [abs(ratio - 1) for ratio in ratios if ratio is not None]
    if not errors:
        return []
    near = sum(error <= 0.25 for error in errors)
    return [
        f"# Predicted from timed messages: {near} of {len(errors)} rows above 64 KiB within 25% of the measured time; "
        f"median error {statistics.median(errors):.0%}"
    ]


def preamble(report: Report) -> list[str]:
    lines = [f"# MPI: {report['mpi']}; ranks: {report['ranks']}; {report['machine']}"]
    if report["ranks"] > (cores := os.cpu_count() or 1):
        lines.append(f"# {report['ranks']} ranks share {cores} cores, so these times measure the scheduler as well")
    if seconds := report.get("flag_round_trip"):
        lines.append(f"# round trip of a flag between ranks of a node: {format_time(seconds)}")
    return lines
