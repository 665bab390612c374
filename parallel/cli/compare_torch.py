"""Train one model by Chorus and by PyTorch's DistributedDataParallel over gloo; compare gradients and speed.

mpiexec -n 2 python scripts/compare_torch.py --model gpt:small --plot race.png

Same first weights, batches and threads, float32 and AdamW. First the gradients of step 1 are compared; then both train
in turns of a few steps, never at the same time. Needs PyTorch (the extra "torch").
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import quartiles
from collectives.cli import launcher
from collectives.cli.launcher import say
from parallel.benchmark import workload
from parallel.data.datasets import LearningTask
from parallel.data.sampler import Batch
from parallel.engine.data_parallel_engine import LAYOUTS, Engine
from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.optim.optimizers import SGD, AdamW

RTOL, ATOL = 1e-5, 4e-5
"""Largest difference of a gradient element: ATOL + RTOL of its size."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    workload.add_options(parser, "gpt:small")
    add = parser.add_argument
    add("--steps", type=workload.COUNT, default=200, metavar="N", help="steps of each side (default 200)")
    add("--turn", type=workload.COUNT, default=10, metavar="N", help="steps in a turn (default 10)")
    add("--rate", type=float, default=3e-4, metavar="X", help="learning rate (default 3e-4)")
    add("--layout", choices=tuple(LAYOUTS), default="dp", help="layout of Chorus (default dp)")
    add("--bucket-mb", type=float, default=25.0, metavar="X", help="size of PyTorch's buckets (default 25, its own)")
    add("--plot", type=Path, metavar="FILE", help="draw both loss curves and all turns (PNG)")
    options = parser.parse_args(argv)
    workload.choose_data(parser, options)
    if not 0 < options.rate < np.inf:
        parser.error(f"argument --rate: expected a number above 0, found {options.rate}")
    if find_spec("torch") is None:
        parser.error("PyTorch is not installed: pip install 'chorus-mpi[torch]'")
    return options


class GradientTap(SGD):
    """Optimizer that keeps the gradient and changes nothing."""

    def update(self, pieces: Any, step: int, scale: float, gather: Any = None) -> None:
        """Keep this rank's spans of the gradient."""
        self.spans = [(piece.span, piece.gradient * scale) for piece in pieces]


def chorus_side(
    task: LearningTask, options: argparse.Namespace, comm: Communicator, optimizer: Any
) -> tuple[Sequential, Engine]:
    """Model and engine of the Chorus side."""
    model = build(options.model, task.inputs, task.outputs)
    settings = Settings(layout=options.layout, seed=options.seed)
    return model, Engine(model, SoftmaxCrossEntropy(), comm, optimizer, settings)


def chorus_gradients(
    task: LearningTask, options: argparse.Namespace, comm: Communicator, batch: Batch
) -> dict[str, np.ndarray]:
    """Gradient of the mean loss over all ranks, by parameter name, complete on every rank."""
    tap = GradientTap(rate=0.0)
    _, engine = chorus_side(task, options, comm, tap)
    engine.step([batch])
    flat = engine.flat
    vector, owners = np.zeros((2, flat.length), np.float32)
    for span, gradient in tap.spans:
        vector[span.start : span.stop] += gradient
        owners[span.start : span.stop] += 1
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, vector)
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, owners)
    vector /= owners
    engine.close()
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
    norms = {"ours_norm": norm(ours), "torch_norm": norm(theirs)}
    return {"max_error": apart[worst], "tensor": worst, **norms, "within": within}


def summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and quartiles of the rates, and of their ratio turn by turn."""
    ratios = np.divide(rates["ours"], rates["torch"])
    return {name: quartiles(values) for name, values in {**rates, "ratio": ratios.tolist()}.items()}


def race(options: argparse.Namespace, comm: Communicator) -> dict[str, Any]:
    """Compare gradients and speed; the same report on every rank."""
    from parallel.benchmark.torch_ddp import TorchTraining  # PyTorch takes a while to load

    task = workload.task_of(options)
    unit = "tokens" if task.kind == "bytes" else "samples"
    source = workload.batches(task, options, comm)
    first = next(source)
    adamw = AdamW(rate=options.rate, beta2=0.95, decay=0.1)
    model, ours = chorus_side(task, options, comm, adamw)
    theirs = TorchTraining(model, adamw, MPI.COMM_WORLD, options.threads, options.bucket_mb)
    gradients = gradients_compared(chorus_gradients(task, options, comm, first), theirs.gradients(first.x, first.y))
    size = comm.Get_size()
    work = int(first.y.size) * size
    parameters = sum(place.size for place in ours.flat.places)
    say(f"{options.model}, {parameters} parameters, {size} ranks, {options.threads} threads each, {work} {unit} a step")
    say(
        f"gradients of step 1: largest difference {gradients['max_error']:.2g} (in {gradients['tensor']}), "
        f"norms {gradients['ours_norm']:.7g} and {gradients['torch_norm']:.7g}: "
        f"{'equal' if gradients['within'] else 'NOT EQUAL'} within {ATOL:g} + {RTOL:g} of the size"
    )
    sides: dict[str, Callable[[Batch], float]] = {
        "ours": lambda batch: ours.step([batch]).loss,
        "torch": lambda batch: theirs.step(batch.x, batch.y),
    }
    losses: dict[str, list[float]] = {name: [] for name in sides}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    steps = chain([first], source)
    with launcher.progress(options.steps, "race", "step") as bar:
        for number, start in enumerate(range(0, options.steps, options.turn)):
            turn = list(islice(steps, min(options.turn, options.steps - start)))
            for name in sorted(sides, reverse=bool(number % 2)):  # the first side alternates
                result = workload.take_turn(sides[name], turn)
                losses[name] += result.values
                rates[name].append(work * len(turn) / result.seconds)
            bar.update(len(turn))
    theirs.close()
    ours.close()
    timed = {name: values[1:] or values for name, values in rates.items()}  # in the first turn both warm up
    machine = {"processor": platform.processor() or platform.machine()}
    return {
        "parameters": parameters,
        "unit": f"{unit}/s",
        "machine": machine | {"numpy": np.__version__, "torch": version("torch")},
        "gradients": gradients,
        "losses": losses,
        "rates": rates,
        "summary": summary(timed),
    }


def show(report: dict[str, Any]) -> None:
    """Print the report."""
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
    report = workload.run_race(options, race, show)
    if options.plot and MPI.COMM_WORLD.Get_rank() == 0:
        from parallel.benchmark.training_plots import plot_peers

        plot_peers(options.plot, report)
    return 0 if report["gradients"]["within"] else 1
