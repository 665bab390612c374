"""Compare predicted with measured step times of 30 trainings, on one node and on an emulated cluster.

mpiexec -n 2 python scripts/verify_plan.py --rows out/rows.json --place node
scripts/cluster --hosts 2 -- python scripts/verify_plan.py --rows out/rows.json --place cluster
python scripts/verify_plan.py --rows out/rows.json                         # compare what was measured

Under mpiexec all trainings of the table for this place and number of ranks are predicted and run, one after another, in
several turns; those that differ between turns, in more. All measurements are added to the file, those of the forecast
too. Without mpiexec steps are predicted again from the file, the factors of `FACTORS` fitted to the rows marked `*`, at
most six, and all rows compared. Exit status 1 if a number is beyond its bound.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import at_least, say
from parallel.benchmark.plan_accuracy import CaseRow, compare
from parallel.engine.settings import Settings, complete
from parallel.forecast.measurement_record import MeasurementRecord
from parallel.forecast.step_forecast import StepForecaster
from parallel.forecast.step_timeline import CAUSES, StepTimeline
from parallel.runtime.resources import cores_per_rank, limit_threads
from parallel.runtime.vector_memory import keep_freed_memory
from parallel.trainer.trainer import Training

SECONDS, STEPS = 1.0, (10, 60)
"""Seconds of a measured training in a turn, and least and most steps."""

WARM_UP = 3
"""Steps before the measured ones."""

SPREAD, MORE_TURNS = 0.1, 2
"""Relative difference of turns from which a training is measured again, in so many turns more."""


class TrainingCase(NamedTuple):
    """Training to predict and to measure: place, ranks and settings; if it is one of those that are fitted to."""

    place: str
    ranks: int
    model: str
    layout: str
    options: Mapping[str, Any] = MappingProxyType({})
    fitted: bool = False

    @property
    def name(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.place} {self.ranks} {self.model} {self.layout} {options}".rstrip()

    @property
    def question(self) -> tuple[str, int, str]:
        """Place, ranks and model, for which layouts compete."""
        return self.place, self.ranks, self.model

    @property
    def settings(self) -> Settings:
        own = MODELS[self.model.partition(":")[0]]
        return complete(own | {"model": self.model, "layout": self.layout, "steps": 1000} | dict(self.options))


MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"data": "digits", "batch": 128, "dropout": 0.0},
    "gpt": {"data": "pydoc", "length": 64, "batch": 8},
}

CASES = [
    TrainingCase("node", 1, "mlp:medium", "dp", fitted=True),
    TrainingCase("node", 1, "gpt:small", "dp"),
    TrainingCase("node", 2, "mlp:medium", "dp"),
    TrainingCase("node", 2, "mlp:medium", "zero1"),
    TrainingCase("node", 2, "mlp:medium", "zero3"),
    TrainingCase("node", 2, "mlp:medium", "ps", fitted=True),
    TrainingCase("node", 2, "gpt:small", "dp"),
    TrainingCase("node", 2, "gpt:small", "zero2", fitted=True),
    TrainingCase("node", 2, "gpt:small", "zero3"),
    TrainingCase("node", 2, "gpt:small", "dp", {"mesh": "tp=2"}),
    TrainingCase("node", 2, "gpt:small", "pp:1f1b"),
    TrainingCase("node", 4, "mlp:medium", "dp"),
    TrainingCase("node", 4, "gpt:small", "dp"),
    TrainingCase("node", 4, "gpt:small", "pp:1f1b"),
    TrainingCase("node", 4, "gpt:small", "dp", {"mesh": "dp=2,tp=2"}),
    TrainingCase("cluster", 2, "mlp:medium", "dp"),
    TrainingCase("cluster", 2, "mlp:medium", "zero1", fitted=True),
    TrainingCase("cluster", 2, "mlp:medium", "zero2"),
    TrainingCase("cluster", 2, "mlp:medium", "ps"),
    TrainingCase("cluster", 2, "gpt:small", "dp"),
    TrainingCase("cluster", 2, "gpt:small", "zero1"),
    TrainingCase("cluster", 2, "gpt:small", "zero3"),
    TrainingCase("cluster", 2, "gpt:small", "dp", {"mesh": "tp=2"}, fitted=True),
    TrainingCase("cluster", 2, "gpt:small", "pp:1f1b"),
    TrainingCase("cluster", 4, "mlp:medium", "dp"),
    TrainingCase("cluster", 4, "mlp:medium", "zero1"),
    TrainingCase("cluster", 4, "mlp:medium", "ps"),
    TrainingCase("cluster", 4, "gpt:small", "dp", fitted=True),
    TrainingCase("cluster", 4, "gpt:small", "pp:1f1b"),
    TrainingCase("cluster", 4, "gpt:small", "dp", {"mesh": "dp=2,tp=2"}),
]


class Turn(NamedTuple):
    """Measurements of one turn on some ranks: those of the forecast, and seconds of steps and events by training."""

    place: str
    record: dict[str, Any]
    steps: dict[str, list[float]]
    events: dict[str, dict[str, float]]


def read_turns(path: Path) -> list[Turn]:
    """Turns of a file, none if there is none; ValueError if it has another form."""
    try:
        return [Turn(**turn) for turn in json.loads(path.read_text())] if path.exists() else []
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: no file of this program: {error}") from None


def measured_steps(settings: Settings, comm: Communicator, expected: float) -> tuple[list[float], dict[str, float]]:
    """Seconds of steps on the slowest rank, and of their events by name on rank 0, on average. Collective."""
    count = min(STEPS[1], max(STEPS[0], round(SECONDS / max(expected, 1e-6))))
    events: defaultdict[str, float] = defaultdict(float)
    seconds = []
    with Training(replace(settings, steps=WARM_UP + count, trace=True), comm) as training:
        for record in training.run():
            seconds.append(record.seconds)
            if len(seconds) > WARM_UP:
                for event in training.engine.events:
                    events[event.name] += (event.end - event.start) / count
            training.engine.events.clear()
    slowest = np.array(seconds[WARM_UP:])
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return slowest.tolist(), {name: float(value) for name, value in events.items()}


def measure(comm: Communicator, path: Path, place: str, turns: int) -> None:
    """Predict and measure all cases of this place and number of ranks, and add them to the file. Collective."""
    keep_freed_memory()
    limit_threads(1 if place == "cluster" else cores_per_rank(comm))
    here = [case for case in CASES if (case.place, case.ranks) == (place, comm.Get_size())]
    done: list[Turn] = []
    for number in range(turns + MORE_TURNS):
        cases = here if number < turns else [case for case in here if spread(case, done) > SPREAD]
        if not cases:
            break
        done.append(_turn(comm, place, cases))
        if comm.Get_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([turn._asdict() for turn in [*read_turns(path), done[-1]]]) + "\n")


def _turn(comm: Communicator, place: str, cases: Sequence[TrainingCase]) -> Turn:
    """Predict and measure these cases once. Collective."""
    record = MeasurementRecord.on(comm)
    forecaster, turn = StepForecaster(record), Turn(place, {}, {}, {})
    for case in cases:
        settings, job = forecaster.prepare(case.settings)
        step = forecaster.step(settings, job)
        turn.steps[case.name], turn.events[case.name] = measured_steps(settings, comm, step.seconds)
        parts = ", ".join(f"{cause} {1e3 * seconds:.2f}" for cause, seconds in step.parts.items())
        measured = 1e3 * median(turn.steps[case.name])
        say(f"{case.name:44} {measured:8.2f} ms, by parts {1e3 * step.seconds:8.2f}: {parts}")
    return turn._replace(record=record.as_dict())


def spread(case: TrainingCase, turns: Sequence[Turn]) -> float:
    """Relative difference of the medians of two neighbouring turns among the sorted ones, at the middle."""
    medians = sorted(median(turn.steps[case.name]) for turn in turns if case.name in turn.steps)
    middle = len(medians) // 2
    return medians[middle] / medians[middle - 1] - 1 if len(medians) > 1 else 0.0


def rows_of(turns: Sequence[Turn]) -> list[CaseRow]:
    """Rows of all cases that were measured, predicted again from the records of their turns.

    The median of the turns' medians counts, and so for predictions.
    """
    found: defaultdict[str, list[tuple[float, StepTimeline]]] = defaultdict(list)
    for turn in turns:
        forecaster = StepForecaster(MeasurementRecord.from_dict(turn.record))
        for case in CASES:
            if case.name in turn.steps:
                step = forecaster.step(*forecaster.prepare(case.settings))
                found[case.name].append((median(turn.steps[case.name]), step))
    rows = []
    for case in CASES:
        if case.name in found:
            measured = median(seconds for seconds, _ in found[case.name])
            steps = sorted((step for _, step in found[case.name]), key=lambda step: step.seconds)
            middle = steps[(len(steps) - 1) // 2 : len(steps) // 2 + 1]
            parts = {cause: sum(step.parts[cause] for step in middle) / len(middle) for cause in CAUSES}
            rows.append(CaseRow(case.name, case.question, measured, parts, case.fitted))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure with --place, else compare; exit status 1 if a number is beyond its bound, 2 without measurements."""
    parser = launcher.LauncherParser(__doc__)
    add = parser.add_argument
    add("--rows", type=Path, required=True, metavar="FILE", help="measurements, JSON")
    add("--place", choices=["node", "cluster"], help="measure the trainings of this place on the ranks here")
    add("--turns", type=at_least(1, int), default=3, metavar="N", help="of all trainings (default 3)")
    args = parser.parse_args(argv)
    try:
        turns = read_turns(args.rows)
    except ValueError as error:
        parser.error(f"--rows: {error}")
    if args.place:
        measure(Communicator(MPI.COMM_WORLD), args.rows, args.place, args.turns)
        return 0
    if not turns:
        parser.error(f"--rows: {args.rows} has no measurements; --place makes some")
    try:
        found = compare(rows_of(turns))
    except ValueError as error:  # of a forecast that measured something else
        parser.error(f"--rows: {args.rows}: {error}; remove the file and measure again")
    print("\n".join(found.lines()))
    return 0 if found.within_bounds else 1
