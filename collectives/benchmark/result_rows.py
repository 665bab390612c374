"""Result rows: JSON fields of one measured configuration, its bandwidths, and merging of several launches."""

import json
import statistics
from typing import Any

from collectives.benchmark.cases import even_form
from collectives.benchmark.timing import Timing
from collectives.selection.timing_file import machine, mpi_name

Row = dict[str, Any]
Report = dict[str, Any]

KEY = ("collective", "algorithm", "dtype", "bytes", "memory", "mode", "in_place", "segments")


BUS_SHARES = {"allreduce": 2} | dict.fromkeys(("scatter", "gather", "allgather", "reduce_scatter", "alltoall"), 1)
"""busbw over algbw, in units of (p-1)/p. 1 for other collectives."""


def bandwidths(collective: str, size: int, nbytes: int, microseconds: float) -> tuple[float, float]:
    """(algbw, busbw) in GB/s (1e9 bytes), as nccl-tests defines them.

    >>> bandwidths("allreduce", 4, 1_000_000, 1000.0)
    (1.0, 1.5)
    """
    algbw, share = nbytes / microseconds / 1e3 if microseconds else 0.0, BUS_SHARES.get(even_form(collective))
    return algbw, algbw * (share * (size - 1) / size if share else 1.0)


def make_row(
    collective: str, algorithm: str, size: int, nbytes: int, ours: Timing, native: Timing | None, **labels: Any
) -> Row:
    """Result row of one measurement, as a dict. `labels` are dtype, memory, mode and further fields."""
    algbw, busbw = bandwidths(collective, size, nbytes, ours.median)
    return {
        "collective": collective,
        "algorithm": algorithm,
        "dtype": "float32",
        "bytes": nbytes,
        "memory": "plain",
        "predicted_us": None,
        **labels,
        "ours_us": ours.median,
        "native_us": native.median if native else None,
        "ratio": ours.median / native.median if native else None,
        "p99_us": ours.p99,
        "min_us": ours.low,
        "max_us": ours.high,
        "native_p99_us": native.p99 if native else None,
        "iterations": ours.iterations,
        "algbw_gbs": algbw,
        "busbw_gbs": busbw,
        "wrong": ours.wrong,
        "native_wrong": native.wrong if native else None,
    }


def make_report(ranks: int, rows: list[Row], **extra: Any) -> Report:
    return {"mpi": mpi_name(), "ranks": ranks, "machine": machine(), **extra, "rows": rows}


def checked_report(data: bytes) -> Report:
    """Report in a JSON file. Raises errors of any kind unless its rows have the form of `make_row`."""
    report: Report = json.loads(data)
    for row in report["rows"]:
        for name, like in {**LIKE, **dict.fromkeys(row.keys() & LABELS)}.items():
            if not isinstance(row[name], KINDS[type(like)]):
                raise ValueError(f"{name} is {row[name]!r}")
    if type(report["ranks"]) is not int or not isinstance(report.get("flag_round_trip"), KINDS[type(None)]):
        raise ValueError("no numbers")
    return report


LIKE = make_row("allreduce", "ring", 1, 8, Timing(1.0, 1.0, 1.0, 1.0, 1, 0), None)
"""Example row. Fields that are None in it may be None."""

LABELS = {"mode", "in_place", "segments", "chosen", "chosen_segments", "expected_us"}
KINDS: dict[type, Any] = {
    str: str,
    int: int,
    float: int | float,
    type(None): str | int | float | None,
}


def merge(reports: list[Report]) -> Report:
    """Merge reports of repeated launches: medians of times and ratios, sums of iterations and of wrong elements.

    ValueError if the launches differ in MPI library, ranks or machine.
    """
    for field in ("mpi", "ranks", "machine"):
        values = {str(report[field]) for report in reports}
        if len(values) > 1:
            raise ValueError(f"launches to merge differ in {field!r}: {' and '.join(sorted(values))}")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for report in reports:
        for row in report["rows"]:
            groups.setdefault(tuple(row.get(name) for name in KEY), []).append(row)
    return {**reports[0], "launches": len(reports), "rows": [_merged(rows) for rows in groups.values()]}


def _merged(rows: list[Row]) -> Row:
    merged = dict(rows[0])
    for field in merged:
        values = [row[field] for row in rows if row.get(field) is not None]
        # errors add up over launches, times are summarised by their median
        if field.endswith(("_us", "_gbs", "wrong")) or field == "ratio":
            merge_values = sum if field.endswith("wrong") else statistics.median
            merged[field] = merge_values(values) if values else None
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    spread = {"ratio_min": min(ratios), "ratio_max": max(ratios)} if ratios else {}
    return merged | spread | {"launches": len(rows), "iterations": sum(row["iterations"] for row in rows)}
