"""Time the layouts of data parallelism against each other: one model, one communicator, in turns.

chorus bench layouts -n 2 --model mlp:medium --micro-batch 8 --json run.json

Two contestants that are no layouts give the bound: `alone` makes the same steps on every rank without communication,
`exchange` only adds a vector as long as the gradient over the ranks. A layout that updates all weights on every rank
cannot take less than both together where a rank's own cores move its messages.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark import reports
from collectives.benchmark.reports import quartiles
from collectives.cli import launcher
from collectives.cli.launcher import say
from parallel.benchmark import workload
from parallel.data.datasets import LearningTask
from parallel.data.sampler import Batch
from parallel.engine.data_parallel_engine import LAYOUTS, Engine
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.nn.workspace import keep_freed_memory
from parallel.optim.optimizers import AdamW
from parallel.runtime.resources import limit_threads

BOUND = ("alone", "exchange")
FIRST = "dp-naive"
"""Layout that the others are compared with."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    workload.add_options(parser, "mlp:medium")
    add = parser.add_argument
    add(
        "--turns",
        type=workload.COUNT,
        default=15,
        metavar="N",
        help="of each layout, after one to warm up (default 15)",
    )
    add("--turn", type=workload.COUNT, default=5, metavar="N", help="steps in a turn (default 5)")
    add("--layouts", default=",".join(LAYOUTS), metavar="NAMES", help=f"with commas; {FIRST} always takes part")
    add("--bucket-mb", type=float, default=4.0, metavar="X", help="of a bucket of gradients (default 4)")
    add("--first-mb", type=float, default=1.0, metavar="X", help="of the smallest ones (default 1)")
    options = parser.parse_args(argv)
    workload.resolve_data(parser, options)
    names = options.layouts.split(",")
    unknown = [name for name in names if name not in LAYOUTS]
    if unknown:
        parser.error(f"argument --layouts: expected some of {', '.join(LAYOUTS)}, found {unknown[0]!r}")
    options.layouts = [FIRST, *(name for name in LAYOUTS if name in names and name != FIRST)]
    return options


class LayoutContestants:
    """Step functions by name; each returns the seconds of its step that were communication."""

    def __init__(self, options: argparse.Namespace, task: LearningTask):
        self._options, self._task = options, task
        self._engines: list[Engine] = []
        world = MPI.COMM_WORLD
        self.steps = {name: self._layout(name, world) for name in options.layouts}
        self.steps |= {"alone": self._layout(FIRST, MPI.COMM_SELF), "exchange": self._exchange(world)}

    @property
    def length(self) -> int:
        """Elements of the gradient vector."""
        return self._engines[0].flat.length

    def _layout(self, name: str, ranks: MPI.Intracomm) -> Callable[[Batch], float]:
        options, task = self._options, self._task
        engine = Engine(
            build(options.model, task.inputs, task.outputs),
            SoftmaxCrossEntropy(),
            Communicator(ranks),  # of its own: it has so many persistent requests, and no more
            AdamW(rate=1e-4),
            Settings(
                layout=name,
                seed=options.seed,
                bucket_bytes=int(options.bucket_mb * 2**20),
                first_bytes=int(options.first_mb * 2**20),
            ),
        )
        self._engines.append(engine)
        here = ranks.Get_rank()  # 0 if alone, whoever has made the batch
        return lambda batch: engine.step([batch._replace(number=here)]).communication

    def _exchange(self, ranks: MPI.Intracomm) -> Callable[[Batch], float]:
        comm = Communicator(ranks)
        vector = comm.zeros(self.length, np.float32)

        def exchange(batch: Batch) -> float:
            began = time.perf_counter()
            comm.Allreduce(MPI.IN_PLACE, vector)
            return time.perf_counter() - began

        return exchange

    def close(self) -> None:
        """Free the requests."""
        for engine in self._engines:
            engine.close()


def summary(seconds: dict[str, list[float]], communication: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Medians by contestant: seconds, speed relative to the first layout, communication, ratio to the bound."""
    bound = sum(np.median(seconds[name]) for name in BOUND)
    return {
        name: {
            "seconds": quartiles(values),
            "speedup": quartiles(np.divide(seconds[FIRST], values).tolist()),
            "communication": float(np.median(np.divide(communication[name], values))),
            "bound": float(bound / np.median(values)),
        }
        for name, values in seconds.items()
    }


def race(options: argparse.Namespace, comm: Communicator) -> dict[str, Any]:
    """Time all contestants; the same report on every rank."""
    task = workload.task_of(options)
    contestants = LayoutContestants(options, task)
    source = workload.batches(task, options, comm)
    seconds: dict[str, list[float]] = {name: [] for name in contestants.steps}
    communication: dict[str, list[float]] = {name: [] for name in contestants.steps}
    names = list(contestants.steps)
    with launcher.progress(options.turns + 1, "race", "turn") as bar:
        for number in range(options.turns + 1):
            turn = [next(source) for _ in range(options.turn)]
            for name in names[number % len(names) :] + names[: number % len(names)]:  # who goes first alternates
                MPI.COMM_WORLD.Barrier()
                began = time.perf_counter()
                within = sum(contestants.steps[name](batch) for batch in turn)
                MPI.COMM_WORLD.Barrier()
                both = MPI.COMM_WORLD.allreduce(np.array([time.perf_counter() - began, within])) / comm.Get_size()
                if number:
                    seconds[name].append(both[0] / options.turn)
                    communication[name].append(both[1] / options.turn)
            bar.update(1)
    contestants.close()
    return {
        "model": options.model,
        "gradient_bytes": 4 * contestants.length,
        "ranks": comm.Get_size(),
        "options": workload.plain(options),
        "machine": {"processor": platform.processor() or platform.machine(), "numpy": np.__version__},
        "mpi": MPI.Get_library_version().splitlines()[0].strip(),
        "seconds": seconds,
        "communication": communication,
        "summary": summary(seconds, communication),
    }


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    options = report["options"]
    say(
        f"{report['model']}, {report['gradient_bytes'] / 1e6:.1f} MB of gradients, {report['ranks']} ranks, "
        f"{options['threads']} threads each, {options['micro_batch']} samples a rank"
    )
    say(
        f"{'':10}{'ms a step':>10}  {'quartiles':>16}  {'x ' + FIRST:>10}  {'quartiles':>14}  {'comm':>5}  {'bound':>6}"
    )
    for name, row in report["summary"].items():
        ms = {key: 1e3 * value for key, value in row["seconds"].items()}
        times = row["speedup"]
        text = f"{name:10}{ms['median']:10.2f}  {ms['q1']:7.2f} - {ms['q3']:6.2f}"
        if name not in BOUND:
            text += f"  {times['median']:10.3f}  {times['q1']:.3f} - {times['q3']:.3f}"
            text += f"  {row['communication']:5.0%}  {row['bound']:6.0%}"
        say(text)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    keep_freed_memory()
    limit_threads(options.threads)
    comm = Communicator(MPI.COMM_WORLD)
    report = race(options, comm)
    if comm.Get_rank() == 0:
        show(report)
        reports.write(options.json, report)
    return 0
