"""Accuracy of predicted steps: factors fitted to a few measured ones, errors, order, and cost of the chosen layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from parallel.planning.measured.step_timeline import COMPUTE, IDLE, NETWORK, SHARED, STEP, UPDATE

FACTORS = {
    "compute": (COMPUTE, IDLE),
    "update": (UPDATE,),
    "shared memory": (SHARED,),
    "network": (NETWORK,),
    "synchronisation": (STEP,),
}
"""Fitted factors, and the causes of predicted time that each multiplies; beside them milliseconds of every step."""

EXPECTED, CLOSE = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]), 0.2
"""Factors that are expected, and by how much a unit of difference counts beside a relative error."""

MEAN_ERROR, LARGEST_ERROR, CORRELATION, REGRET = 0.10, 0.30, 0.95, 0.05
"""Bounds: mean and largest relative error, least rank correlation, and slowdown of a chosen layout to the best one."""


class CaseRow(NamedTuple):
    """Training: name; what layouts compete for; seconds of a step as measured, and as predicted by cause."""

    name: str
    question: tuple[str, int, str]
    measured: float
    parts: Mapping[str, float]
    fitted: bool = False


class PlanAccuracy(NamedTuple):
    """Result of a comparison: rows with their predicted seconds, and the fitted factors.

    `regrets` are by question: by how much the layout that is predicted to be fastest is slower than the fastest one.
    """

    rows: Sequence[CaseRow]
    predicted: Sequence[float]
    factors: np.ndarray
    regrets: Mapping[tuple[str, int, str], float]

    @property
    def errors(self) -> np.ndarray:
        """Relative error of every row."""
        measured = np.array([row.measured for row in self.rows])
        return np.asarray(np.asarray(self.predicted) / measured - 1)

    @property
    def correlation(self) -> float:
        """Spearman's rank correlation."""
        pairs = [row.measured for row in self.rows], self.predicted
        ranks = [np.argsort(np.argsort(values)) for values in pairs]
        return float(np.asarray(np.corrcoef(ranks))[0, 1]) if len(self.rows) > 1 else 1.0

    @property
    def within_bounds(self) -> bool:
        errors = np.abs(self.errors)
        close = bool(errors.mean() <= MEAN_ERROR and errors.max() <= LARGEST_ERROR)
        return close and self.correlation >= CORRELATION and max(self.regrets.values(), default=0.0) <= REGRET

    def lines(self) -> Iterator[str]:
        """Text: factors, rows, and the four numbers that have bounds."""
        words = ", ".join(f"{name} {value:.2f}" for name, value in zip([*FACTORS, "ms a step"], self.factors))
        yield f"factors, fitted to the rows with *: {words}"
        yield f"{'':44} {'measured':>10} {'predicted':>10} {'error':>7}"
        for row, predicted, error in zip(self.rows, self.predicted, self.errors):
            times = f"{1e3 * row.measured:8.2f}ms {1e3 * predicted:8.2f}ms"
            yield f"{row.name:44} {times} {error:>+7.0%}{'*' if row.fitted else ''}"
        sizes = np.abs(self.errors)
        worst = (
            f"mean error {sizes.mean():.1%} (at most {MEAN_ERROR:.0%}), largest {sizes.max():.1%} ({LARGEST_ERROR:.0%})"
        )
        yield f"{len(self.rows)} steps: {worst}, rank correlation {self.correlation:.3f} (at least {CORRELATION})"
        for (place, ranks, model), regret in self.regrets.items():
            yield f"chosen layout of {place} {ranks} {model}: {regret:.1%} slower than the best (at most {REGRET:.0%})"


def compare(turns: Iterable[Sequence[CaseRow]]) -> PlanAccuracy:
    """Compare measured steps with those predicted with factors fitted to the marked rows.

    Of a training's rows in several turns the one with the median quotient of measured and predicted seconds counts, and
    of a question's regrets in several turns their median.
    """
    turns = [list(rows) for rows in turns]
    by_name: defaultdict[str, list[CaseRow]] = defaultdict(list)
    for row in (row for rows in turns for row in rows):
        by_name[row.name].append(row)
    rows = [_middle(rows) for rows in by_name.values()]
    factors = _fit([row for row in rows if row.fitted])
    regrets: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    for question, competing in ((question, rows) for rows in turns for question, rows in _questions(rows).items()):
        if len(competing) > 1:
            chosen = min(competing, key=lambda row: float(_vector(row.parts) @ factors))
            regrets[question].append(chosen.measured / min(row.measured for row in competing) - 1)
    predicted = [float(_vector(row.parts) @ factors) for row in rows]
    return PlanAccuracy(rows, predicted, factors, {question: median(each) for question, each in regrets.items()})


def _questions(rows: Iterable[CaseRow]) -> dict[tuple[str, int, str], list[CaseRow]]:
    found: defaultdict[tuple[str, int, str], list[CaseRow]] = defaultdict(list)
    for row in rows:
        found[row.question].append(row)
    return found


def _middle(rows: Sequence[CaseRow]) -> CaseRow:
    """Row with the median quotient of measured seconds and the sum of predicted parts (of two the lower one)."""
    return sorted(rows, key=lambda row: row.measured / sum(row.parts.values()))[(len(rows) - 1) // 2]


def _vector(parts: Mapping[str, float]) -> np.ndarray:
    """Seconds of a prediction that each of `FACTORS` multiplies."""
    return np.array([*(sum(parts.get(cause, 0.0) for cause in causes) for causes in FACTORS.values()), 1e-3])


def _fit(rows: Sequence[CaseRow]) -> np.ndarray:
    """Factors, and milliseconds of every step, with least squares of relative errors, close to `EXPECTED`."""
    matrix = np.array([_vector(row.parts) / row.measured for row in rows]).reshape(len(rows), len(EXPECTED))
    weight = CLOSE**2 * np.eye(len(EXPECTED))
    found: np.ndarray = np.linalg.solve(matrix.T @ matrix + weight, matrix.sum(0) + weight @ EXPECTED)
    return found
