"""Verdict on ``algorithm="auto"``: how often it is near the best algorithm, and near its own expected time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from collectives.benchmark.result_rows import KEY, Row

NEAR_BEST, NEAR_EXPECTED = 0.10, 0.25
"""Largest relative differences that count as near."""

POINT = tuple(name for name in KEY if name != "algorithm")


class Verdict(NamedTuple):
    """Counts of points; a point is a collective at one size, with one dtype, memory and form."""

    compared: int  #: points at which ``auto`` and at least one algorithm were measured
    near_best: int  #: of these, ``auto`` takes at most `NEAR_BEST` longer than the fastest algorithm
    expected: int  #: points at which ``auto`` has an expected time
    near_expected: int  #: of these, the expected time differs from the measured one by at most `NEAR_EXPECTED`

    def lines(self) -> list[str]:
        """Comment lines of the text output: none if nothing was compared."""
        if not self.compared:
            return []
        return [
            f"# auto: {self.near_best} of {self.compared} points within {NEAR_BEST:.0%} of the best algorithm",
            f"# auto's expected time: {self.near_expected} of {self.expected} points within {NEAR_EXPECTED:.0%} "
            "of the measured time",
        ]


def judge(rows: list[Row]) -> Verdict:
    """Count the points of result rows at which ``auto`` is near the best algorithm and near its expected time."""
    points: defaultdict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        points[tuple(row.get(name) for name in POINT)][row["algorithm"]] = row
    compared = near_best = expected = near_expected = 0
    for by_name in points.values():
        auto = by_name.pop("auto", None)
        if auto is None or not by_name:
            continue
        best = min(row["ours_us"] for row in by_name.values())
        compared += 1
        near_best += auto["ours_us"] <= (1 + NEAR_BEST) * best
        if auto.get("expected_us") is not None:
            expected += 1
            near_expected += abs(auto["expected_us"] - auto["ours_us"]) <= NEAR_EXPECTED * auto["ours_us"]
    return Verdict(compared, near_best, expected, near_expected)
