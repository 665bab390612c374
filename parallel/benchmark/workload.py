"""Workload of a benchmark of trainings: options, data, and the batches of every step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collectives import Communicator
from collectives.cli import launcher
from parallel.data.datasets import LearningTask, load
from parallel.data.sampler import Batch, Sampler

DATA = {"gpt": "pydoc", "mlp": "digits"}
COUNT = launcher.at_least(1, int)


def add_options(parser: argparse.ArgumentParser, model: str) -> None:
    """Add the options of the workload; `model` is the default."""
    add = parser.add_argument
    add("--model", default=model, metavar="NAME[:SIZE]", help=f"gpt or mlp, with a size (default {model})")
    add("--data", metavar="NAME|FILE", help="what train.py understands (default pydoc for gpt, digits for mlp)")
    add("--length", type=COUNT, default=128, metavar="N", help="tokens of a sequence (default 128)")
    add("--micro-batch", type=COUNT, default=16, metavar="N", help="samples of a rank and step (default 16)")
    add("--threads", type=COUNT, default=1, metavar="N", help="for each rank (default 1)")
    add("--seed", type=int, default=0, metavar="N", help="(default 0)")
    add("--json", type=Path, metavar="FILE", help="write all results")


def resolve_data(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set the data of the model, or end with an error."""
    family = options.model.partition(":")[0]
    if family not in DATA:
        parser.error(f"argument --model: expected one of {', '.join(DATA)}, found {options.model!r}")
    options.data = options.data or DATA[family]


def task_of(options: argparse.Namespace) -> LearningTask:
    """The data; ValueError if it has no classes or bytes."""
    task = load(options.data, seed=options.seed, length=options.length)
    if task.kind == "values":
        raise ValueError(f"--data: expected classes or bytes to learn, {task.name} has values")
    return task


def batches(task: LearningTask, options: argparse.Namespace, comm: Communicator) -> Iterator[Batch]:
    """This rank's micro-batch of each step. All are full, so that every step is the same work."""
    rank, size = comm.Get_rank(), comm.Get_size()
    global_batch = size * options.micro_batch
    if len(task.train) < global_batch:
        raise ValueError(f"--micro-batch: a step takes {global_batch} samples, and {task.name} has {len(task.train)}")
    sampler = Sampler(len(task.train), global_batch, options.micro_batch, options.seed)
    for step in sampler.ahead():
        if step.samples == global_batch:
            yield next(step.batches(task.train, [rank]))


def plain(options: argparse.Namespace) -> dict[str, Any]:
    """The options as JSON values."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
