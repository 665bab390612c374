"""Train one model by Chorus and by PyTorch's DistributedDataParallel over gloo; compare gradients and speed.

mpiexec -n 2 python scripts/compare_torch.py --model gpt:small --plot race.png

Same first weights, batches and threads, float32 and AdamW. First the gradients of step 1 are compared; then both train
in turns of a few steps, never at the same time. Needs PyTorch (the extra "torch").
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark import reports
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
from parallel.optim.optimizers import SGD, AdamW
from parallel.runtime.resources import limit_threads

RTOL, ATOL = 1e-5, 4e-5
"""Largest difference of a gradient element: ATOL + RTOL of its size."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    workload.add_options(parser, "gpt:small")
    add = parser.add_argument
    add("--steps", type=workload.COUNT, default=200, metavar="N", help="of each (default 200)")
    add("--turn", type=workload.COUNT, default=10, metavar="N", help="steps until it is the other's turn (default 10)")
    add("--rate", type=float, default=3e-4, metavar="X", help="learning rate (default 3e-4)")
    add("--layout", choices=tuple(LAYOUTS), default="dp", help="of ours (default dp)")
    add("--bucket-mb", type=float, default=25.0, metavar="X", help="of PyTorch's buckets (default 25, its own)")
    add("--plot", type=Path, metavar="FILE", help="draw both loss curves and all turns (PNG)")
    options = parser.parse_args(argv)
    workload.resolve_data(parser, options)
    if not 0 < options.rate < np.inf:
        parser.error(f"argument --rate: expected a number above 0, found {options.rate}")
    if find_spec("torch") is None:
        parser.error("PyTorch is not installed: pip install 'chorus-mpi[torch]'")
    return options


class GradientTap(SGD):
    """Optimizer that keeps the gradient and changes nothing."""

    def update(self, pieces: Any, step: int, scale: float, gather: Any = None) -> None:
        """Keep the slices of this rank."""
        self.seen = [(piece.span, piece.gradient * scale) for piece in pieces]


class ChorusTraining:
    """Engine and model of the Chorus side."""

    def __init__(self, task: LearningTask, options: argparse.Namespace, comm: Communicator, optimizer: Any):
        self.model = build(options.model, task.inputs, task.outputs)
        self.engine = Engine(
            self.model,
            SoftmaxCrossEntropy(),
            comm,
            optimizer,
            Settings(layout=options.layout, seed=options.seed),
        )

    def step(self, batch: Batch) -> float:
        """One update; returns the mean loss over all ranks."""
        return self.engine.step([batch]).loss


def our_gradients(
    task: LearningTask, options: argparse.Namespace, comm: Communicator, batch: Batch
) -> dict[str, np.ndarray]:
    """Gradient of the mean loss over all ranks, by parameter name, complete on every rank."""
    tap = GradientTap(rate=0.0)
    ours = ChorusTraining(task, options, comm, tap)
    ours.step(batch)
    flat = ours.engine.flat
    vector, owners = np.zeros(flat.length, np.float32), np.zeros(flat.length, np.float32)
    for span, gradient in tap.seen:
        vector[span.start : span.stop] += gradient
        owners[span.start : span.stop] += 1
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, vector)
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, owners)
    vector /= owners
    ours.engine.close()
    return {place.parameter.name: flat.view(vector, place.parameter, place.span.start) for place in flat.places}


def gradients_compared(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Largest difference and its tensor, both norms, and True if every element is within bounds."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"parameters of one side only: {sorted(ours.keys() ^ theirs.keys())}")
    apart = {name: float(np.abs(ours[name] - theirs[name]).max(initial=0.0)) for name in ours}
    worst = max(apart, key=lambda name: apart[name])

    def norm(side: dict[str, np.ndarray]) -> float:
        return float(np.sqrt(sum(np.square(values, dtype=np.float64).sum() for values in side.values())))

    within = all(np.allclose(ours[name], theirs[name], rtol=RTOL, atol=ATOL) for name in ours)
    return {
        "max_error": apart[worst],
        "tensor": worst,
        "ours_norm": norm(ours),
        "torch_norm": norm(theirs),
        "within": within,
    }


class TrainingTurn(NamedTuple):
    """Mean losses of some steps, and their seconds on the slowest rank."""

    losses: list[float]
    seconds: float


def take_turn(step: Callable[[Batch], float], turn: list[Batch], comm: Communicator) -> TrainingTurn:
    """Let one side make some steps."""
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    losses = [step(batch) for batch in turn]
    MPI.COMM_WORLD.Barrier()
    seconds = MPI.COMM_WORLD.allreduce(time.perf_counter() - began, MPI.MAX)
    return TrainingTurn([loss / comm.Get_size() for loss in MPI.COMM_WORLD.allreduce(np.array(losses))], seconds)


def summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and quartiles of the rates, and of their ratio turn by turn."""
    ratios = np.divide(rates["ours"], rates["torch"])
    series = {**rates, "ratio": ratios.tolist()}
    return {name: reports.quartiles(values) for name, values in series.items()}


def race(options: argparse.Namespace, comm: Communicator) -> dict[str, Any]:
    """Compare gradients and speed; the same report on every rank."""
    from parallel.benchmark.torch_ddp import TorchTraining  # PyTorch takes a while to load

    task = workload.task_of(options)
    unit = "tokens" if task.kind == "bytes" else "samples"
    source = workload.batches(task, options, comm)
    first = next(source)
    adamw = AdamW(rate=options.rate, beta2=0.95, decay=0.1)
    ours = ChorusTraining(task, options, comm, adamw)
    theirs = TorchTraining(ours.model, adamw, MPI.COMM_WORLD, options.threads, options.bucket_mb)
    gradients = gradients_compared(our_gradients(task, options, comm, first), theirs.gradients(first.x, first.y))
    size = comm.Get_size()
    work = int(first.y.size) * size
    parameters = sum(place.size for place in ours.engine.flat.places)
    say(f"{options.model}, {parameters} parameters, {size} ranks, {options.threads} threads each, {work} {unit} a step")
    say(
        f"gradients of step 1: largest difference {gradients['max_error']:.2g} (in {gradients['tensor']}), "
        f"norms {gradients['ours_norm']:.7g} and {gradients['torch_norm']:.7g}: "
        f"{'equal' if gradients['within'] else 'NOT EQUAL'} within {ATOL:g} + {RTOL:g} of the size"
    )
    sides: dict[str, Callable[[Batch], float]] = {
        "ours": ours.step,
        "torch": lambda batch: theirs.step(batch.x, batch.y),
    }
    losses: dict[str, list[float]] = {name: [] for name in sides}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    done, number = 0, 0
    with launcher.progress(options.steps, "race", "step") as bar:
        while done < options.steps:
            turn = [first] * (done == 0) + [
                next(source) for _ in range(min(options.turn, options.steps - done) - (done == 0))
            ]
            for name in sorted(sides, reverse=bool(number % 2)):  # who goes first alternates
                result = take_turn(sides[name], turn, comm)
                losses[name] += result.losses
                rates[name].append(work * len(turn) / result.seconds)
            done, number = done + len(turn), number + 1
            bar.update(len(turn))
    theirs.close()
    ours.engine.close()
    timed = {name: values[1:] or values for name, values in rates.items()}  # in the first turn both warm up
    return {
        "model": options.model,
        "parameters": parameters,
        "unit": f"{unit}/s",
        "ranks": size,
        "options": workload.plain(options),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "numpy": np.__version__,
            "torch": version("torch"),
        },
        "gradients": gradients,
        "losses": losses,
        "rates": rates,
        "summary": summary(timed),
    }


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    for name, label, digits in (("ours", "Chorus", 0), ("torch", "PyTorch", 0), ("ratio", "ratio", 3)):
        of = report["summary"][name]
        unit = "" if name == "ratio" else f" {report['unit']}"
        say(f"{label:8} {of['median']:.{digits}f}{unit}  (quartiles {of['q1']:.{digits}f} to {of['q3']:.{digits}f})")
    ours, theirs = (np.array(report["losses"][name]) for name in ("ours", "torch"))
    apart = np.abs(ours - theirs).max()
    say(f"loss after {len(ours)} steps: {ours[-1]:.5f} and {theirs[-1]:.5f}; largest difference on the way {apart:.2g}")


def main(argv: list[str] | None = None) -> int:
    """Print the report; 0 if the gradients are equal."""
    options = parse(argv)
    keep_freed_memory()
    limit_threads(options.threads)
    comm = Communicator(MPI.COMM_WORLD)
    report = race(options, comm)
    if comm.Get_rank() == 0:
        show(report)
        reports.write(options.json, report)
        if options.plot:
            from parallel.benchmark.training_plots import plot_peers

            options.plot.parent.mkdir(parents=True, exist_ok=True)
            plot_peers(options.plot, report)
    return 0 if report["gradients"]["within"] else 1
