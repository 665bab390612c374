"""Rows as text: OSU's first columns, nccl-tests' bandwidths, and the native time beside ours."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from collectives.benchmark.result_rows import Report, Row


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.1f}"


def _algorithm(row: Row) -> str:
    chosen = row.get("chosen")
    return f"auto:{chosen}" if chosen else str(row["algorithm"])


def _predicted_ratio(row: Row) -> float | None:
    """Ratio of the predicted to the measured time."""
    return row["predicted_us"] / row["ours_us"] if row.get("predicted_us") and row["ours_us"] else None


Column = tuple[str, int, Callable[[Row], str]]


def _field(name: str, show: Callable[[Any], str] = _number) -> Callable[[Row], str]:
    return lambda row: show(row.get(name))


COLUMNS: list[Column] = [
    ("# Size", -10, lambda row: str(row["bytes"])),
    ("Algorithm", -24, _algorithm),
    ("Ours(us)", 11, _field("ours_us")),
    ("Native(us)", 11, _field("native_us")),
    ("Ratio", 7, _field("ratio")),
    ("algbw(GB/s)", 12, _field("algbw_gbs")),
    ("busbw(GB/s)", 12, _field("busbw_gbs")),
    ("predicted", 10, _field("predicted_us")),
    ("/ ours", 7, lambda row: _number(_predicted_ratio(row))),
    ("#wrong", 7, _field("wrong", str)),
]
FULL: list[Column] = [
    ("Min(us)", 11, _field("min_us")),
    ("Max(us)", 11, _field("max_us")),
    ("p99(us)", 11, _field("p99_us")),
    ("Nat.min(us)", 12, _field("native_min_us")),
    ("Nat.max(us)", 12, _field("native_max_us")),
    ("Nat.p99(us)", 12, _field("native_p99_us")),
    ("Iterations", 11, _field("iterations", str)),
]


def _line(cells: list[str], columns: list[Column]) -> str:
    aligned = [
        cell.ljust(-width) if width < 0 else cell.rjust(width)
        for cell, (_, width, _) in zip(cells, columns, strict=True)
    ]
    return " ".join(aligned).rstrip()


class TableStyle(NamedTuple):
    """Columns and title of a table. Several memories or modes get a column, one is named in the title."""

    full: bool = False  # with the columns that OSU shows under -f
    memories: Sequence[str] = ()
    modes: Sequence[str] = ()

    def _varying(self) -> list[str]:
        return [name for name, all in (("memory", self.memories), ("mode", self.modes)) if len(all) > 1]

    def columns(self) -> list[Column]:
        """The columns of the table."""
        first, *others = COLUMNS
        varying: list[Column] = [(name.capitalize(), -12, _field(name, str)) for name in self._varying()]
        return [first, *varying, *others, *(FULL if self.full else [])]

    def heading(self) -> str:
        """The line that names the columns."""
        return _line([title for title, _, _ in self.columns()], self.columns())

    def line(self, row: Row) -> str:
        """One row as text."""
        return _line([show(row) for _, _, show in self.columns()], self.columns())

    def title(self, row: Row) -> str:
        """The comment line above a block of rows that differ in size, algorithm and what has a column."""
        varying = self._varying()
        words = [row["collective"], row["dtype"]]
        words += [] if "mode" in varying else [row.get("mode", "blocking")]
        words += [] if "memory" in varying else [f"{row['memory']} memory"]
        return f"# {', '.join(words)}{', in place' if row.get('in_place') else ''}"

    def block_of(self, row: Row) -> tuple[Any, ...]:
        """Key of a block of rows with one title."""
        same = ("collective", "dtype", "mode", "memory", "in_place")
        return tuple(row.get(name) for name in same if name not in self._varying())


def verdict(rows: list[Row]) -> str | None:
    """Comment line with the model's error on rows above 64 KiB; None without predictions."""
    ratios = [_predicted_ratio(row) for row in rows if row["bytes"] > 1 << 16]
    errors = [abs(ratio - 1) for ratio in ratios if ratio is not None]
    if not errors:
        return None
    near = sum(error <= 0.25 for error in errors)
    return (
        f"# The model: {near} of {len(errors)} rows above 64 KiB within 25 % of what was measured; "
        f"median error {statistics.median(errors):.0%}"
    )


def preamble(report: Report) -> list[str]:
    """Comment lines with the origin of the figures."""
    lines = [f"# MPI: {report['mpi']}; ranks: {report['ranks']}; {report['machine']}"]
    if report["ranks"] > (cores := os.cpu_count() or 1):
        lines.append(f"# {report['ranks']} ranks share {cores} cores, so these times measure the scheduler as well")
    return lines
