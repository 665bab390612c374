"""Benchmark of data-parallel layouts against each other: same model and batches, timed in turns.

chorus bench layouts -n 2 --model mlp:medium --micro-batch 8

Two contestants that are no layouts give the bound: `alone` makes the same steps on every rank without communication,
`exchange` only adds a vector as long as the gradient over the ranks. A layout that updates all weights on every rank
cannot take less than both together where a rank's own cores move its messages.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import quartiles
from collectives.cli import launcher
from collectives.cli.arguments import names_of
from collectives.cli.launcher import say
from collectives.units import format_bytes
from parallel.data.datasets import LearningTask, load
from parallel.data.sampler import Batch, Sampler
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.optim.optimizers import AdamW
from parallel.runtime.resources import limit_threads
from parallel.runtime.vector_memory import keep_freed_memory
from parallel.trainer.task_setup import expect_fit

DATA = {"gpt": "pydoc", "mlp": "digits"}  # default data by model

COUNT = launcher.at_least(1, int)


def add_options(parser: argparse.ArgumentParser, model: str, turn: int) -> None:
    """Add the options of a benchmark by turns. `model` is the default of --model, `turn` of --turn (steps per turn)."""
    add = parser.add_argument
    add("--model", default=model, metavar="NAME[:SIZE]", help=f"gpt or mlp, with a size (default {model})")
    add("--data", metavar="NAME|FILE", help="data as for chorus train (default pydoc for gpt, digits for mlp)")
    add("--length", type=COUNT, default=128, metavar="N", help="tokens of a sequence (default 128)")
    add("--micro-batch", type=COUNT, default=16, metavar="N", help="samples of a rank and step (default 16)")
    add("--threads", type=COUNT, default=1, metavar="N", help="BLAS threads per rank (default 1)")
    add("--turn", type=COUNT, default=turn, metavar="N", help=f"steps in a turn (default {turn})")


def choose_data(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set `options.data` to the model's default data if not given. Exit with a usage error if the model is unknown."""
    family = options.model.partition(":")[0]
    if family not in DATA:
        parser.error(f"argument --model: expected one of {', '.join(DATA)}, found {options.model!r}")
    options.data = options.data or DATA[family]


def begin(options: argparse.Namespace, together: bool = False) -> tuple[Communicator, LearningTask, Iterator[Batch]]:
    """Set BLAS threads. Return communicator, data, and endless iterator of this rank's micro-batch of each step.

    With `together` a step has one micro-batch for all ranks. Steps with fewer samples are skipped. Collective.
    ValueError if the data have no classes or bytes, do not fit the model, or have fewer samples than a step.
    """
    keep_freed_memory()
    limit_threads(options.threads)
    comm, task = Communicator(MPI.COMM_WORLD), load(options.data, length=options.length)
    expect_fit(options.model, task)
    if task.kind == "values":
        raise ValueError(f"--data: expected classes or bytes to learn, {task.name} has values")
    shares, share = (1, 0) if together else (comm.Get_size(), comm.Get_rank())
    total = shares * options.micro_batch
    if len(task.train) < total:
        raise ValueError(
            f"--micro-batch: expected at most {len(task.train)} samples in a step, as many as {task.name} has, "
            f"found {total}"
        )
    steps = Sampler(len(task.train), total, options.micro_batch).ahead()
    batches = (next(step.batches(task.train, [share])) for step in steps if step.samples == total)
    return comm, task, batches


class TrainingTurn(NamedTuple):
    """Results of one turn: mean over ranks of the step function's result, by step. Seconds per step (slowest rank)."""

    values: list[float]
    seconds: float


def run_race(
    steps: dict[str, Callable[[Batch], float]], source: Iterable[Batch], lengths: Sequence[int]
) -> dict[str, list[TrainingTurn]]:
    """Run each step function on the same batches, ``lengths[i]`` in turn i. Returns its turns by name. Collective.

    Another function begins each turn.
    """
    names, source = list(steps), iter(source)
    turns: dict[str, list[TrainingTurn]] = {name: [] for name in names}
    with launcher.progress(len(lengths), "race", "turn") as bar:
        for number, length in enumerate(lengths):
            batches, first = list(islice(source, length)), number % len(names)
            for name in names[first:] + names[:first]:
                turns[name].append(_turn(steps[name], batches))
            bar.update()
    return turns


def _turn(step: Callable[[Batch], float], batches: list[Batch]) -> TrainingTurn:
    world = MPI.COMM_WORLD
    world.Barrier()
    began = time.perf_counter()
    values = np.array([step(batch) for batch in batches])
    world.Barrier()
    seconds = world.allreduce(time.perf_counter() - began, MPI.MAX) / len(batches)
    return TrainingTurn((world.allreduce(values) / world.Get_size()).tolist(), seconds)


BOUND = ("alone", "exchange")
FIRST = "dp-naive"  # layout that the others are compared with


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    add_options(parser, "mlp:medium", turn=5)
    add = parser.add_argument
    add("--turns", type=COUNT, default=15, metavar="N", help="turns after one to warm up (default 15)")
    named = names_of("layout", LAYOUTS)
    add("--layouts", type=named, default=list(LAYOUTS), metavar="NAMES", help=f"with commas; always {FIRST}")
    size = launcher.at_least(0, float, 1 << 20)
    add("--first-mb", type=size, default=1.0, metavar="X", help="size of the smallest buckets (default 1)")
    options = parser.parse_args(argv)
    choose_data(parser, options)
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
    comm, task, source = begin(options)
    with ExitStack() as stack:
        engines = {name: engine_of(name, MPI.COMM_WORLD, options, task) for name in options.layouts}
        engines["alone"] = engine_of(FIRST, MPI.COMM_SELF, options, task)
        steps = {}
        for name, engine in engines.items():
            stack.enter_context(engine)
            steps[name] = training_step(engine, 0 if name == "alone" else comm.Get_rank())
        length = engines[FIRST].flat.length
        steps["exchange"] = exchange_step(Communicator(MPI.COMM_WORLD), length)
        turns = run_race(steps, source, [options.turn] * (options.turns + 1))
    ranks = f"{comm.Get_size()} ranks, {options.threads} threads each, {options.micro_batch} samples a rank"
    say(f"{options.model}, {format_bytes(4 * length)} of gradients, {ranks}")
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
