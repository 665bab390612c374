"""Runs of cells of the option table, and the difference between a cell and its reference."""

import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from conformance.thread_communicator import run_threads

from support.differential.columns import Column
from support.differential.programs import OWN, EnginePlayer, Observation, engine_maker
from support.differential.replicas import AveragedReplicas
from support.differential.rows import Row
from support.differential.rules import Rule
from support.differential.tasks import Task


class Cell(NamedTuple):
    """Row of options, task and column."""

    row: Row
    task: Task
    column: Column

    def __str__(self) -> str:
        return f"{self.row.name} | {self.task.name} | {self.column}"


class Refusal(NamedTuple):
    """Error that a rank raised.

    Attributes
    ----------
    kind, text : name of its type, and message
    ends_all : True if it escaped from the user's own code, which ends the job
    time : of the monotonic clock, which all processes of a node share
    """

    kind: str
    text: str
    ends_all: bool = False
    time: float = 0.0


Outcome = list[Observation] | Refusal


def settings_of(row: Row, column: Column) -> dict[str, Any]:
    """Settings of a cell's engine: a row replaces those that are common to all."""
    common = {"precision": "fp64"} | ({} if row.sets_micro_batches else {"micro_batch": 2, "batch": column.samples})
    return common | column.settings | dict(row.settings)


def reports_of(row: Row, column: Column) -> tuple[str, ...]:
    """Fields of reports that are those of one rank."""
    if column.averaged and {"tau", "overlap"} & row.settings.keys():
        return ("rate",)
    if column.layout == "sgp" or column.kind == "hogwild":
        return ("rate",)
    if column.averaged or column.kind == "federated" or column.schedule.startswith("pipedream"):
        return ("loss", "count", "rate")
    return ("loss", "count", "rate", "norm", "terms", "counts")


def play(cell: Cell, comm: Any, folder: Path) -> list[Observation]:
    """Observations of a cell's program on this rank. Collective."""
    row, task, column = cell
    make = engine_maker(task, row.optimizer, comm, settings_of(row, column))
    with EnginePlayer(task, column, make, folder, reports_of(row, column)) as player:
        return player.play(row.program)


def outcome(cell: Cell, comm: Any, folder: Path) -> Outcome:
    """Observations, or the error that this rank raises. Collective."""
    try:
        return play(cell, comm, folder)
    except Exception as error:
        ends_all = hasattr(error, OWN)
        if ends_all and hasattr(comm, "meeting"):
            comm.meeting.abort()  # as the end of one process ends the job
        return Refusal(type(error).__name__, str(error), ends_all)


def outcomes_on_threads(cell: Cell) -> list[Outcome]:
    """Outcomes of all ranks, which are threads."""
    with tempfile.TemporaryDirectory() as folder:
        return run_threads(cell.column.ranks, lambda comm: outcome(cell, comm, Path(folder, "saved")))


@lru_cache(maxsize=256)
def _reference(
    row: Row, task: Task, samples: int, averaged: int, settings: tuple[tuple[str, Any], ...], reports: Sequence[str]
) -> Any:
    column = Column(1, dict(settings), samples=samples)
    cell = Cell(row, task, column)

    def alone(comm: Any) -> Any:
        own = row.alone(settings_of(row, column))
        own = {name: value for name, value in own.items() if name not in ("tau", "overlap")}
        own |= {"layout": "local", "tau": 1} if averaged else {}  # one without samples follows the schedule
        return engine_maker(task, row.optimizer, comm, own)

    def replicas(comm: Any) -> Callable[[], Any]:
        def make(**others: Any) -> Any:
            made = [alone(comm)(**others) for _ in range(averaged)]
            engines, models, optimizers = zip(*made)
            if others:  # from the mean, in a layout that averages nothing
                return engines[0], models[0], optimizers[0]
            how = {"period": row.settings.get("tau", 1), "overlap": row.settings.get("overlap", 0.0)}
            return (
                AveragedReplicas(engines, **how),
                [one for some in models for one in some],
                [one for (one,) in optimizers],
            )

        return make

    def main(comm: Any) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            make = replicas(comm) if averaged else alone(comm)
            with EnginePlayer(task, cell.column, make, Path(folder, "saved"), reports) as player:
                return player.play(row.same_as or row.program)

    return run_threads(1, main)[0]


def has_parts(cell: Cell) -> bool:
    """True if one rank can add in the order of the ranks of a mesh: mixtures have no parts of sequences."""
    return bool(cell.row.settings.get("reproducible")) and not (cell.task.has_experts and cell.column.size("cp") > 1)


def tolerance_of(cell: Cell) -> float:
    """Largest difference of a cell: bits only where one rank can add in the same order."""
    if cell.row.tolerance or has_parts(cell) or not cell.row.settings.get("reproducible"):
        return cell.row.tolerance
    return {"fp64": 1e-9, "fp32": 1e-4}[cell.row.settings["precision"]]


def reference(cell: Cell) -> list[Observation]:
    """Observations of one rank, or of replicas of one rank each that are averaged."""
    row, task, column = cell
    averaged = column.ranks if column.averaged and column.ranks > 1 else 0
    settings: dict[str, Any] = dict(column.settings) if column.kind == "federated" else {}
    if has_parts(cell):  # bits depend on the logical shards and parts
        parts = {
            "tensor_shards": column.size("tp"),
            "sequence_parts": column.size("cp"),
            "expert_shards": column.size("etp"),
        }
        settings |= {name: size for name, size in parts.items() if size > 1}
    return _reference(row, task, column.samples, averaged, tuple(settings.items()), reports_of(row, column))


# ------------------------------------------------------------------------------------------ comparison


def problem(cell: Cell, found: Sequence[Outcome]) -> str:
    """Difference between a cell's outcomes on all ranks and what the table expects, as text; empty if there is none."""
    rules = cell.row.refusals_of(cell.task, cell.column)
    refused = [one for one in found if isinstance(one, Refusal)]
    if refused:
        return _wrong_refusal(found, refused, rules)
    if rules:
        return f"expected the refusal {rules[0].text!r}, found a result"
    first = list(found[0])
    for rank, other in enumerate(found[1:], 1):
        if cell.column.kind != "ps" and (text := difference(_of_all(other), _of_all(first), 0.0)):
            return f"rank {rank} differs from rank 0: {text}"
    return difference(first, reference(cell), tolerance_of(cell))


def _of_all(found: Sequence[Observation]) -> list[Observation]:
    """Observations that are equal on all ranks, bit for bit."""
    return [one for one in found if any(word in one.name for word in (": state ", ": prediction", ": evaluation"))]


def _wrong_refusal(found: Sequence[Outcome], refused: Sequence[Refusal], rules: Sequence[Rule]) -> str:
    if not rules:
        return f"expected a result, found {refused[0].kind}: {refused[0].text}"
    refused = [one for one in refused if one.ends_all] or refused
    if len(refused) < len(found) and not refused[0].ends_all:
        return f"expected a refusal on all ranks, found it on {len(refused)} of {len(found)}: {refused[0]}"
    odd = [one for one in refused if not any(rule.fits(one.kind, one.text) for rule in rules)]
    expected = " or ".join(repr(rule.text) for rule in rules)
    return f"expected the refusal {expected}, found {odd[0].kind}: {odd[0].text}" if odd else ""


def difference(found: Sequence[Observation], expected: Sequence[Observation], tolerance: float) -> str:
    """First observation that differs, as text; without tolerance bits are compared."""
    names, wanted = [one.name for one in found], [one.name for one in expected]
    if names != wanted:
        odd = next(
            (pair for pair in zip(names, wanted) if pair[0] != pair[1]), (names[len(wanted) :], wanted[len(names) :])
        )
        return f"expected the value {odd[1]!r}, found {odd[0]!r}"
    for (name, here), (_, there) in zip(found, expected):
        if not _same(here, there, tolerance):
            return f"{name}: expected {_short(there)}, found {_short(here)}{_distance(here, there)}"
    return ""


def _same(here: Any, there: Any, tolerance: float) -> bool:
    if here is None or there is None or (isinstance(here, str | bool | list) and not isinstance(here, np.ndarray)):
        return here == there
    a, b = np.asarray(here), np.asarray(there)
    if a.shape != b.shape or a.dtype.kind in "iub" or not tolerance:
        return a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    scale = max(float(np.abs(b).max(initial=0)), 1e-3)
    return bool(np.abs(a - b).max(initial=0) <= tolerance * scale) or np.array_equal(a, b, equal_nan=True)


def _distance(here: Any, there: Any) -> str:
    a, b = np.asarray(here), np.asarray(there)
    if a.shape != b.shape or "O" in (a.dtype.kind, b.dtype.kind) or a.dtype.kind not in "iuf":
        return ""
    return f" (largest difference {np.abs(a - b).max(initial=0):.3g})"


def _short(value: Any) -> str:
    array = np.asarray(value)
    return repr(value) if array.size < 8 else f"an array of shape {array.shape}"
