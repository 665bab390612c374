"""Compare predicted with measured step times of 30 trainings, on one node and on an emulated cluster.

python scripts/verify_plan.py --rows out/rows.json                         # measured before: fit and compare
mpiexec -n 2 python scripts/verify_plan.py --rows out/rows.json --place node
scripts/cluster --hosts 2 -- python scripts/verify_plan.py --rows out/rows.json --place cluster

Under mpiexec all trainings of the table for this place and number of ranks are predicted, then run, and their rows
added to the file, in place of older ones. Without it, the factors of `Calibration` are fitted to the rows marked `*`,
at most six, and all rows compared. Exit status 1 if an error is beyond the bounds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import say
from parallel.engine.settings import Settings, complete
from parallel.forecast.step_forecast import StepForecaster
from parallel.forecast.step_timeline import COMPUTE, IDLE, NETWORK, SHARED, UPDATE
from parallel.runtime.resources import cores_per_rank, limit_threads
from parallel.runtime.vector_memory import keep_freed_memory
from parallel.trainer.trainer import Training

SECONDS = 1.0  # of a measured training
WINDOW, LEAST, MOST = 5, 2, 12  # steps of a window; least and most windows of a training
WARM_UP = 5  # steps before the measured ones


FACTORS = {"compute": (COMPUTE, IDLE), "update": (UPDATE,), "shared memory": (SHARED,), "network": (NETWORK,)}
"""Fitted factors, and the causes of predicted time that each multiplies; beside them milliseconds of every step."""

EXPECTED, CLOSE = np.array([1.15, 1.0, 1.0, 1.0, 1.0]), 0.2
"""Factors that are expected, and by how much a unit of difference counts beside a relative error."""

MEAN_ERROR, LARGEST_ERROR, CORRELATION = 0.10, 0.30, 0.95


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


class CaseRow(NamedTuple):
    """Seconds of a step: measured, predicted by cause without `Calibration`, and of measured events by name."""

    measured: float
    parts: dict[str, float]
    events: dict[str, float]

    def fastest(self, other: CaseRow) -> CaseRow:
        """The faster measurement and the faster prediction of two: a disturbance of the machine only adds time."""
        measured, _, events = min(self, other, key=lambda row: row.measured)
        return CaseRow(measured, min(self.parts, other.parts, key=lambda parts: sum(parts.values())), events)


def read_rows(path: Path) -> dict[str, CaseRow]:
    return {name: CaseRow(**row) for name, row in json.loads(path.read_text()).items()} if path.exists() else {}


def measured_step(settings: Settings, comm: Communicator, expected: float) -> tuple[float, dict[str, float]]:
    """Seconds of a step, and of its events by name on rank 0 on average. Collective.

    The fastest median of `WINDOW` steps in sequence counts, on the slowest rank: a disturbance only adds time.
    """
    steps = WARM_UP + WINDOW * min(MOST, max(LEAST, round(SECONDS / WINDOW / max(expected, 1e-6))))
    events: defaultdict[str, float] = defaultdict(float)
    seconds = []
    with Training(replace(settings, steps=steps, trace=True), comm) as training:
        for record in training.run():
            seconds.append(record.seconds)
            if len(seconds) > WARM_UP:
                for event in training.engine.events:
                    events[event.name] += (event.end - event.start) / (steps - WARM_UP)
            training.engine.events.clear()
    windows = [median(seconds[at : at + WINDOW]) for at in range(WARM_UP, steps, WINDOW)]
    return min(map(max, zip(*comm.allgather(windows)))), {name: float(value) for name, value in events.items()}


def measure(comm: Communicator, path: Path, place: str) -> None:
    """Predict and measure all cases of this place and number of ranks, and write their rows. Collective."""
    keep_freed_memory()
    limit_threads(1 if place == "cluster" else cores_per_rank(comm))
    forecaster = StepForecaster(comm)
    for case in CASES:
        if (case.place, case.ranks) != (place, comm.Get_size()):
            continue
        settings, job = forecaster.prepare(case.settings)
        step = forecaster.step(settings, job)
        measured, events = measured_step(settings, comm, step.seconds)
        row = CaseRow(measured, dict(step.parts), events)
        if comm.Get_rank() == 0:
            rows = read_rows(path)
            rows[case.name] = row.fastest(rows.get(case.name, row))
            path.write_text(json.dumps({name: each._asdict() for name, each in rows.items()}, indent=1) + "\n")
        parts = ", ".join(f"{cause} {1e3 * seconds:.2f}" for cause, seconds in step.parts.items())
        say(f"{case.name:44} {1e3 * measured:8.2f} ms, by parts {1e3 * step.seconds:8.2f}: {parts}")


def _vector(parts: Mapping[str, float]) -> np.ndarray:
    """Seconds of a prediction that each of `FACTORS` multiplies."""
    return np.array([*(sum(parts.get(cause, 0.0) for cause in causes) for causes in FACTORS.values()), 1e-3])


def fit(rows: Mapping[str, CaseRow]) -> np.ndarray:
    """Factors, and milliseconds of every step, with least squares of relative errors, close to `EXPECTED`."""
    known = [rows[case.name] for case in CASES if case.fitted and case.name in rows]
    matrix = np.array([_vector(row.parts) / row.measured for row in known]).reshape(len(known), len(EXPECTED))
    weight = CLOSE**2 * np.eye(len(EXPECTED))
    found: np.ndarray = np.linalg.solve(matrix.T @ matrix + weight, matrix.sum(0) + weight @ EXPECTED)
    return found


def compare(rows: Mapping[str, CaseRow]) -> bool:
    """Print measured and predicted steps with factors fitted to some rows; True if all errors are within the bounds."""
    factors = fit(rows)
    words = ", ".join(f"{name} {value:.2f}" for name, value in zip([*FACTORS, "ms a step"], factors))
    print(f"factors, fitted to the rows with *: {words}")
    print(f"{'':44} {'measured':>10} {'predicted':>10} {'error':>7}")
    pairs = []
    for case in CASES:
        if case.name in rows:
            measured, predicted = rows[case.name].measured, float(_vector(rows[case.name].parts) @ factors)
            pairs.append((measured, predicted))
            mark = "*" if case.fitted else ""
            times = f"{1e3 * measured:8.2f}ms {1e3 * predicted:8.2f}ms"
            print(f"{case.name:44} {times} {predicted / measured - 1:>+7.0%}{mark}")
    errors = [abs(predicted / measured - 1) for measured, predicted in pairs]
    ranks = [np.argsort(np.argsort(values)) for values in zip(*pairs)]
    order = float(np.asarray(np.corrcoef(ranks))[0, 1]) if len(pairs) > 1 else 1.0
    worst = f"mean error {np.mean(errors):.1%}, largest {max(errors):.1%}"
    print(f"{len(pairs)} steps: {worst}, rank correlation {order:.3f}")
    return bool(np.mean(errors) <= MEAN_ERROR and max(errors) <= LARGEST_ERROR and order >= CORRELATION)


def main(argv: list[str] | None = None) -> int:
    """Measure with --place, else compare; exit status 1 if an error is beyond the bounds, 2 without rows."""
    parser = launcher.LauncherParser(__doc__)
    add = parser.add_argument
    add("--rows", type=Path, required=True, metavar="FILE", help="measured rows, JSON")
    add("--place", choices=["node", "cluster"], help="measure the trainings of this place on the ranks here")
    args = parser.parse_args(argv)
    if args.place:
        measure(Communicator(MPI.COMM_WORLD), args.rows, args.place)
        return 0
    rows = read_rows(args.rows)
    if not any(case.name in rows for case in CASES):
        parser.error(f"--rows: {args.rows} has no measured rows; --place measures some")
    return 0 if compare(rows) else 1
