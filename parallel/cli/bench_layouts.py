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
from collectives.benchmark.reports import quartiles
from collectives.cli import launcher
from collectives.cli.launcher import say
from parallel.benchmark import workload
from parallel.cli.argument_types import names_of
from parallel.data.datasets import LearningTask
from parallel.data.sampler import Batch
from parallel.engine.data_parallel_engine import LAYOUTS, Engine
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.optim.optimizers import AdamW

BOUND = ("alone", "exchange")
FIRST = "dp-naive"
"""Layout that the others are compared with."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    workload.add_options(parser, "mlp:medium")
    add = parser.add_argument
    add("--turns", type=workload.COUNT, default=15, metavar="N", help="turns after one to warm up (default 15)")
    add("--turn", type=workload.COUNT, default=5, metavar="N", help="steps in a turn (default 5)")
    add(
        "--layouts", type=names_of(LAYOUTS), default=list(LAYOUTS), metavar="NAMES", help=f"with commas; always {FIRST}"
    )
    add("--bucket-mb", type=float, default=4.0, metavar="X", help="size of a bucket of gradients (default 4)")
    add("--first-mb", type=float, default=1.0, metavar="X", help="size of the smallest buckets (default 1)")
    options = parser.parse_args(argv)
    workload.choose_data(parser, options)
    options.layouts = [FIRST, *(name for name in LAYOUTS if name in options.layouts and name != FIRST)]
    return options


def engine_of(name: str, ranks: MPI.Intracomm, options: argparse.Namespace, task: LearningTask) -> Engine:
    """Engine of a layout, with a model and a communicator of its own, whose persistent requests are limited."""
    settings = Settings(
        layout=name,
        seed=options.seed,
        bucket_bytes=int(options.bucket_mb * 2**20),
        first_bytes=int(options.first_mb * 2**20),
    )
    model = build(options.model, task.inputs, task.outputs)
    return Engine(model, SoftmaxCrossEntropy(), Communicator(ranks), AdamW(rate=1e-4), settings)


def training_step(engine: Engine, rank: int) -> Callable[[Batch], float]:
    """Step function of an engine, which returns the seconds in communication."""
    return lambda batch: engine.step([batch._replace(number=rank)]).communication


def exchange_step(comm: Communicator, length: int) -> Callable[[Batch], float]:
    """Step function that only adds a vector over the ranks, and returns its seconds."""
    vector = comm.zeros(length, np.float32)

    def exchange(batch: Batch) -> float:
        began = time.perf_counter()
        comm.Allreduce(MPI.IN_PLACE, vector)
        return time.perf_counter() - began

    return exchange


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
    task, world = workload.task_of(options), MPI.COMM_WORLD
    engines = {name: engine_of(name, world, options, task) for name in options.layouts}
    engines["alone"] = engine_of(FIRST, MPI.COMM_SELF, options, task)
    steps = {name: training_step(engine, 0 if name == "alone" else comm.Get_rank()) for name, engine in engines.items()}
    length = engines[FIRST].flat.length
    steps["exchange"] = exchange_step(Communicator(world), length)
    source = workload.batches(task, options, comm)
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    communication: dict[str, list[float]] = {name: [] for name in names}
    with launcher.progress(options.turns + 1, "race", "turn") as bar:
        for number in range(options.turns + 1):
            turn = [next(source) for _ in range(options.turn)]
            first = number % len(names)
            for name in names[first:] + names[:first]:
                result = workload.take_turn(steps[name], turn)
                if number:  # the first turn warms up
                    seconds[name].append(result.seconds / options.turn)
                    communication[name].append(sum(result.values) / options.turn)
            bar.update(1)
    for engine in engines.values():
        engine.close()
    return {
        "gradient_bytes": 4 * length,
        "machine": {"processor": platform.processor() or platform.machine(), "numpy": np.__version__},
        "mpi": MPI.Get_library_version().splitlines()[0].strip(),
        "seconds": seconds,
        "communication": communication,
        "summary": summary(seconds, communication),
    }


def show(report: dict[str, Any]) -> None:
    """Print the report."""
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
    workload.run_race(parse(argv), race, show)
    return 0
