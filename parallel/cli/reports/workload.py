"""Workload of a training benchmark: command-line options, data and batches, and the loop that times contestants."""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from parallel.data.datasets import LearningTask, load
from parallel.data.sampler import Batch, Sampler
from parallel.runtime.resources import limit_threads
from parallel.runtime.vector_memory import keep_freed_memory
from parallel.trainer.task_setup import expect_fit

DATA = {"gpt": "pydoc", "mlp": "digits"}  # default data by model

COUNT = launcher.at_least(1, int)


def add_options(parser: argparse.ArgumentParser, model: str, turn: int) -> None:
    """Add the options of a benchmark by turns; `model` is the default of --model, `turn` of --turn (steps per turn)."""
    add = parser.add_argument
    add("--model", default=model, metavar="NAME[:SIZE]", help=f"gpt or mlp, with a size (default {model})")
    add("--data", metavar="NAME|FILE", help="data as for chorus train (default pydoc for gpt, digits for mlp)")
    add("--length", type=COUNT, default=128, metavar="N", help="tokens of a sequence (default 128)")
    add("--micro-batch", type=COUNT, default=16, metavar="N", help="samples of a rank and step (default 16)")
    add("--threads", type=COUNT, default=1, metavar="N", help="BLAS threads per rank (default 1)")
    add("--turn", type=COUNT, default=turn, metavar="N", help=f"steps in a turn (default {turn})")


def choose_data(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set `options.data` to the model's default data if not given; exit with a usage error if the model is unknown."""
    family = options.model.partition(":")[0]
    if family not in DATA:
        parser.error(f"argument --model: expected one of {', '.join(DATA)}, found {options.model!r}")
    options.data = options.data or DATA[family]


def begin(options: argparse.Namespace, together: bool = False) -> tuple[Communicator, LearningTask, Iterator[Batch]]:
    """Set BLAS threads; return communicator, data, and endless iterator of this rank's micro-batch of each step.

    With `together` a step has one micro-batch, which all ranks get. Steps with fewer samples are skipped. Collective.
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
    """Results of one turn: mean over ranks of the step function's result, by step; seconds per step (slowest rank)."""

    values: list[float]
    seconds: float


def run_race(
    steps: dict[str, Callable[[Batch], float]], source: Iterable[Batch], lengths: Sequence[int]
) -> dict[str, list[TrainingTurn]]:
    """Run each step function on the same batches, ``lengths[i]`` in turn i; returns its turns by name. Collective.

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
