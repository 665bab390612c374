"""Compare predicted with measured step times of 30 trainings, on one node and on an emulated cluster.

mpiexec -n 2 python tests/studies/verify_plan.py --rows out/rows.json --place node
scripts/cluster --hosts 2 -- python tests/studies/verify_plan.py --rows out/rows.json --place cluster
python tests/studies/verify_plan.py --rows out/rows.json                         # compare what was measured

Under mpiexec all trainings of the table for this place and number of ranks are predicted and run in several turns. In a
turn the layouts that compete for one model run a few steps each, alternately, and the forecast measures before and
after them: a machine whose speed changes within minutes is as fast for one as for the other. All measurements are
added to the file, those of the forecast too. Without mpiexec steps are predicted again from the file, the factors of
`FACTORS` fitted to the rows marked `*`, at most six, and all rows compared. Exit status 1 if a number is beyond its
bound.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from plan_accuracy import CaseRow, compare

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import at_least, say
from parallel.engine.settings import Settings
from parallel.planning.measured.measurement_record import MeasurementRecord
from parallel.planning.measured.step_forecast import StepForecaster
from parallel.planning.measured.step_timeline import CAUSES
from parallel.runtime.resources import cores_per_rank, limit_threads
from parallel.runtime.vector_memory import keep_freed_memory
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training

BLOCKS, SECONDS, STEPS = 5, 0.3, (4, 20)
"""Blocks of steps of a training in a turn; a block's seconds, and its least and most steps."""

WARM_UP = 3
"""Steps of a training before its first block."""


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
    """Measurements of trainings that compete: the forecast's, before and after; steps and events by training, in s."""

    place: str
    records: list[dict[str, Any]]
    steps: dict[str, list[float]]
    events: dict[str, dict[str, float]]


def read_turns(path: Path) -> list[Turn]:
    """Turns of a file, none if there is none; ValueError if it has another form."""
    try:
        return [Turn(**turn) for turn in json.loads(path.read_text())] if path.exists() else []
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: no file of this program: {error}") from None


class BlockwiseTraining:
    """Training that makes some steps at a time. All methods are collective.

    Attributes
    ----------
    seconds : list of float
        Of all measured steps, on this rank. A block's first step, which finds the caches of another training, is none.
    events : defaultdict of float
        Seconds of this rank's events by name, of all measured steps.
    """

    def __init__(self, settings: Settings, comm: Communicator, expected: float):
        self._steps = min(STEPS[1], max(STEPS[0], round(SECONDS / max(expected, 1e-6))))
        self._training = Training(replace(settings, steps=WARM_UP + BLOCKS * (1 + self._steps), trace=True), comm)
        self._records = self._training.run()
        self.seconds: list[float] = []
        self.events: defaultdict[str, float] = defaultdict(float)
        self._make(WARM_UP)

    def block(self) -> None:
        self._make(1)
        for _ in range(self._steps):
            self.seconds.append(self._make(1))
            for event in self._training.engine.events:
                self.events[event.name] += event.end - event.start

    def _make(self, count: int) -> float:
        """Make so many steps; seconds of the last one."""
        for _ in range(count):
            self._training.engine.events.clear()
            seconds = next(self._records).seconds
        return seconds

    def close(self) -> None:
        for _ in self._records:  # none is left, but the engine comes to rest
            pass
        self._training.close()


def measure(comm: Communicator, path: Path, place: str, turns: int) -> None:
    """Predict and measure all cases of this place and number of ranks, and add them to the file. Collective."""
    keep_freed_memory()
    limit_threads(1 if place == "cluster" else cores_per_rank(comm))
    competing: defaultdict[Hashable, list[TrainingCase]] = defaultdict(list)
    for case in CASES:
        if (case.place, case.ranks) == (place, comm.Get_size()):
            competing[case.question].append(case)
    for _ in range(turns):
        for cases in competing.values():
            turn = _turn(comm, place, cases)
            if comm.Get_rank() == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps([each._asdict() for each in [*read_turns(path), turn]]) + "\n")


def _turn(comm: Communicator, place: str, cases: Sequence[TrainingCase]) -> Turn:
    """Predict and measure cases that compete. Collective."""
    records = [MeasurementRecord.on(comm)]
    jobs = [StepForecaster(records[0]).prepare(case.settings) for case in cases]
    expected = [StepForecaster(records[0]).step(*job).seconds for job in jobs]
    with ExitStack() as open_trainings:
        trainings = []
        for (settings, _), seconds in zip(jobs, expected):
            trainings.append(BlockwiseTraining(settings, comm, seconds))
            open_trainings.callback(trainings[-1].close)
        for _ in range(BLOCKS):
            for training in trainings:
                training.block()
    records.append(MeasurementRecord.on(comm))
    again = [StepForecaster(records[1]).step(*job) for job in jobs]
    turn = Turn(place, [record.as_dict() for record in records], {}, {})
    for case, training, before, after in zip(cases, trainings, expected, again):
        slowest = np.array(training.seconds)
        comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        turn.steps[case.name] = slowest.tolist()
        turn.events[case.name] = {name: seconds / len(slowest) for name, seconds in training.events.items()}
        parts = ", ".join(f"{cause} {1e3 * seconds:.2f}" for cause, seconds in after.parts.items())
        predicted = f"{1e3 * before:8.2f} and {1e3 * after.seconds:8.2f}: {parts}"
        say(f"{case.name:44} {1e3 * median(slowest):8.2f} ms, by parts {predicted}")
    return turn


def rows_of(turns: Sequence[Turn]) -> list[list[CaseRow]]:
    """Rows of each turn's cases, predicted again from its records: the mean of those before and after."""
    found = []
    for turn in turns:
        here = [case for case in CASES if case.name in turn.steps]
        forecasters = [StepForecaster(MeasurementRecord.from_dict(record)) for record in turn.records]
        rows = []
        for case in here:
            steps = [forecaster.step(*forecaster.prepare(case.settings)) for forecaster in forecasters]
            parts = {cause: sum(step.parts[cause] for step in steps) / len(steps) for cause in CAUSES}
            rows.append(CaseRow(case.name, case.question, median(turn.steps[case.name]), parts, case.fitted))
        found.append(rows)
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure with --place, else compare; exit status 1 if a number is beyond its bound, 2 without measurements."""
    parser = launcher.LauncherParser(__doc__)
    add = parser.add_argument
    add("--rows", type=Path, required=True, metavar="FILE", help="measurements, JSON")
    add("--place", choices=["node", "cluster"], help="measure the trainings of this place on the ranks here")
    add("--turns", type=at_least(1, int), default=5, metavar="N", help="of all trainings (default 5)")
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


if __name__ == "__main__":
    launcher.run(main)
