"""Rows as text: OSU's first columns, nccl-tests' bandwidths, and the native time beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchlib.rows import Report, Row, cores


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.1f}"


def _algorithm(row: Row) -> str:
    chosen = row.get("chosen")
    return f"auto:{chosen}" if chosen else str(row["algorithm"])


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
    ("Model(us)", 11, _field("predicted_us")),
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


def columns(full: bool = False) -> list[Column]:
    """The columns of the table, with `full` the ones that OSU shows under -f."""
    return COLUMNS + FULL if full else COLUMNS


def heading(full: bool = False) -> str:
    """The line that names the columns."""
    return _line([title for title, _, _ in columns(full)], columns(full))


def line(row: Row, full: bool = False) -> str:
    """One row as text."""
    return _line([show(row) for _, _, show in columns(full)], columns(full))


def preamble(report: Report) -> list[str]:
    """Comment lines that say where the figures come from."""
    lines = [f"# MPI: {report['mpi']}; ranks: {report['ranks']}; {report['machine']}"]
    if report["ranks"] > cores():
        note = f"{report['ranks']} ranks share {cores()} cores, so these times measure the scheduler as well"
        lines.append(f"# {note}")
    return lines


def title(row: Row) -> str:
    """The comment line above a block of rows that differ in size and algorithm only."""
    place = ", in place" if row.get("in_place") else ""
    mode = row.get("mode", "blocking")
    return f"# {row['collective']}, {row['dtype']}, {mode}, {row['memory']} memory{place}"


def block_of(row: Row) -> tuple[Any, ...]:
    """What makes a new block, with a new title, begin."""
    return tuple(row.get(name) for name in ("collective", "dtype", "mode", "memory", "in_place"))
