"""Workload of a benchmark of trainings: options, data, batches of every step, and steps in timed turns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark import reports
from collectives.cli import launcher
from parallel.data.datasets import LearningTask, load
from parallel.data.sampler import Batch, Sampler
from parallel.engine.settings import Settings, complete
from parallel.nn.workspace import keep_freed_memory
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.resources import cores_per_rank, limit_threads

DATA = {"gpt": "pydoc", "mlp": "digits"}
"""Default data by model."""

COUNT = launcher.at_least(1, int)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add --data, --model and --steps of a training with default settings."""
    parser.add_argument("--data", default="digits", metavar="NAME", help="default digits")
    parser.add_argument("--model", default="mlp", metavar="NAME", help="default mlp")
    parser.add_argument("--steps", type=COUNT, metavar="N", help="default: those of the recipe")


def recipe_settings(options: argparse.Namespace, comm: Communicator) -> Settings:
    """Settings by the options of `add_recipe`; also sets the number of BLAS threads. Collective."""
    collective_call(comm, partial(limit_threads, cores_per_rank(comm)), "BLAS threads")
    return complete({"data": options.data, "model": options.model, "steps": options.steps})


def add_options(parser: argparse.ArgumentParser, model: str) -> None:
    """Add the options of the workload; `model` is the default."""
    add = parser.add_argument
    add("--model", default=model, metavar="NAME[:SIZE]", help=f"gpt or mlp, with a size (default {model})")
    add("--data", metavar="NAME|FILE", help="data as for chorus train (default pydoc for gpt, digits for mlp)")
    add("--length", type=COUNT, default=128, metavar="N", help="tokens of a sequence (default 128)")
    add("--micro-batch", type=COUNT, default=16, metavar="N", help="samples of a rank and step (default 16)")
    add("--threads", type=COUNT, default=1, metavar="N", help="BLAS threads per rank (default 1)")
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    add("--json", type=Path, metavar="FILE", help="write all results")


def choose_data(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set the data of the model, or end with an error."""
    family = options.model.partition(":")[0]
    if family not in DATA:
        parser.error(f"argument --model: expected one of {', '.join(DATA)}, found {options.model!r}")
    options.data = options.data or DATA[family]


def task_of(options: argparse.Namespace) -> LearningTask:
    """Data of the workload; ValueError if it has no classes or bytes."""
    task = load(options.data, seed=options.seed, length=options.length)
    if task.kind == "values":
        raise ValueError(f"--data: expected classes or bytes to learn, {task.name} has values")
    return task


def batches(task: LearningTask, options: argparse.Namespace, comm: Communicator) -> Iterator[Batch]:
    """This rank's micro-batch of each step. All are full, so that every step is the same work."""
    rank, total = comm.Get_rank(), comm.Get_size() * options.micro_batch
    if len(task.train) < total:
        raise ValueError(f"--micro-batch: a step takes {total} samples, and {task.name} has {len(task.train)}")
    sampler = Sampler(len(task.train), total, options.micro_batch, options.seed)
    for step in sampler.ahead():
        if step.samples == total:
            yield next(step.batches(task.train, [rank]))


class TrainingTurn(NamedTuple):
    """Results of some steps, each the mean over all ranks, and their seconds on the slowest rank."""

    values: list[float]
    seconds: float


def take_turn(step: Callable[[Batch], float], turn: list[Batch]) -> TrainingTurn:
    """Call a step function with every batch of a turn, between barriers. Collective over MPI.COMM_WORLD."""
    world = MPI.COMM_WORLD
    world.Barrier()
    began = time.perf_counter()
    values = np.array([step(batch) for batch in turn])
    world.Barrier()
    seconds = world.allreduce(time.perf_counter() - began, MPI.MAX)
    return TrainingTurn((world.allreduce(values) / world.Get_size()).tolist(), seconds)


def run_race(
    options: argparse.Namespace,
    race: Callable[[argparse.Namespace, Communicator], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run a race; print its report and write it to --json. Return the report."""
    keep_freed_memory()
    limit_threads(options.threads)
    comm = Communicator(MPI.COMM_WORLD)
    report = {"model": options.model, "ranks": comm.Get_size(), "options": plain(options)} | race(options, comm)
    if comm.Get_rank() == 0:
        show(report)
        reports.write(options.json, report)
    return report


def plain(options: argparse.Namespace) -> dict[str, Any]:
    """Options as JSON values."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
