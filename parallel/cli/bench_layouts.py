"""Benchmark of data-parallel layouts against each other: same model and batches, timed in turns.

chorus bench layouts -n 2 --model mlp:medium --micro-batch 8

Two contestants that are no layouts give the bound: `alone` makes the same steps on every rank without communication,
`exchange` only adds a vector as long as the gradient over the ranks. A layout that updates all weights on every rank
cannot take less than both together where a rank's own cores move its messages.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import quartiles
from collectives.cli import launcher
from collectives.cli.arguments import names_of
from collectives.cli.launcher import say
from parallel.cli.reports import workload
from parallel.data.datasets import LearningTask
from parallel.data.sampler import Batch
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.optim.optimizers import AdamW

BOUND = ("alone", "exchange")
FIRST = "dp-naive"  # layout that the others are compared with


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    workload.add_options(parser, "mlp:medium", turn=5)
    add = parser.add_argument
    add("--turns", type=workload.COUNT, default=15, metavar="N", help="turns after one to warm up (default 15)")
    named = names_of("layout", LAYOUTS)
    add("--layouts", type=named, default=list(LAYOUTS), metavar="NAMES", help=f"with commas; always {FIRST}")
    size = launcher.at_least(0, float, 1 << 20)
    add("--first-mb", type=size, default=1.0, metavar="X", help="size of the smallest buckets (default 1)")
    options = parser.parse_args(argv)
    workload.choose_data(parser, options)
    options.layouts = [FIRST, *(name for name in LAYOUTS if name in options.layouts and name != FIRST)]
    return options


def engine_of(name: str, ranks: MPI.Intracomm, options: argparse.Namespace, task: LearningTask) -> DataParallelEngine:
    """Engine that trains a new copy of the model with the layout `name`, on a new communicator over `ranks`."""
    settings = Settings(layout=name, first_bytes=int(options.first_mb * 2**20))
    model = build(options.model, task.inputs, task.outputs)
    return DataParallelEngine(model, SoftmaxCrossEntropy(), Communicator(ranks), AdamW(rate=1e-4), settings)


def training_step(engine: DataParallelEngine, rank: int) -> Callable[[Batch], float]:
    """Step function of the benchmark: trains on a batch and returns the seconds spent in communication."""
    return lambda batch: engine.step([batch._replace(number=rank)]).communication


def exchange_step(comm: Communicator, length: int) -> Callable[[Batch], float]:
    """Step function of the benchmark that only does an allreduce of a float32 vector and returns its seconds."""
    vector = comm.zeros(length, np.float32)

    def exchange(batch: Batch) -> float:
        began = time.perf_counter()
        comm.Allreduce(MPI.IN_PLACE, vector)
        return time.perf_counter() - began

    return exchange


def main(argv: list[str] | None = None) -> int:
    """Time all contestants and print medians: time per step, speed relative to dp-naive, share of the bound reached."""
    options = parse(argv)
    comm, task, source = workload.begin(options)
    with ExitStack() as stack:
        engines = {name: engine_of(name, MPI.COMM_WORLD, options, task) for name in options.layouts}
        engines["alone"] = engine_of(FIRST, MPI.COMM_SELF, options, task)
        steps = {}
        for name, engine in engines.items():
            stack.enter_context(engine)
            steps[name] = training_step(engine, 0 if name == "alone" else comm.Get_rank())
        length = engines[FIRST].flat.length
        steps["exchange"] = exchange_step(Communicator(MPI.COMM_WORLD), length)
        turns = workload.run_race(steps, source, [options.turn] * (options.turns + 1))
    ranks = f"{comm.Get_size()} ranks, {options.threads} threads each, {options.micro_batch} samples a rank"
    say(f"{options.model}, {4e-6 * length:.1f} MB of gradients, {ranks}")
    relative = f"{'x ' + FIRST:>10}  {'quartiles':>14}  {'comm':>5}  {'bound':>6}"
    say(f"{'':10}{'ms a step':>10}  {'quartiles':>16}  {relative}")
    seconds = {name: np.array([turn.seconds for turn in its[1:]]) for name, its in turns.items()}  # without warm-up
    bound = sum(np.median(seconds[name]) for name in BOUND)
    for name, values in seconds.items():
        ms, times = quartiles(1e3 * values), quartiles(seconds[FIRST] / values)
        text = f"{name:10}{ms['median']:10.2f}  {ms['q1']:7.2f} - {ms['q3']:6.2f}"
        if name not in BOUND:
            communication = np.median([np.mean(turn.values) / turn.seconds for turn in turns[name][1:]])
            text += f"  {times['median']:10.3f}  {times['q1']:.3f} - {times['q3']:.3f}"
            text += f"  {communication:5.0%}  {bound / np.median(values):6.0%}"
        say(text)
    return 0
