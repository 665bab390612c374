"""Train one model with every gradient compression and with none, from several seeds, and compare the results.

mpiexec -n 4 python scripts/compare_compression.py --seeds 5
mpiexec -n 2 python scripts/compare_compression.py --data pydoc --model gpt:tiny --steps 400 --ways none,int8,sign

Settings are those of `chorus train` for the data and model; all compressions share the seeds, and so the first weights
and the order of samples. `apart` is the mean difference to the first one, seed by seed, in standard deviations of the
first one over its seeds: a difference within 1 is no larger than that of another seed.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import write
from collectives.cli import launcher
from collectives.cli.launcher import say
from parallel.benchmark.workload import plain
from parallel.engine import settings
from parallel.grad_compression import AUTO, NONE, parse
from parallel.runtime import resources
from parallel.runtime.collective_errors import collective_call
from parallel.trainer.trainer import Training

WAYS = "none,int8,int4,sign,topk:0.01,powersgd:2,qsgd:4,terngrad"
"""Default of --ways."""


def ways(text: str) -> list[str]:
    """Argument type: names that `--compress` takes."""
    for name in (names := text.split(",")):
        try:
            if name not in (NONE, AUTO):
                parse(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    add = parser.add_argument
    add("--data", default="digits", metavar="NAME", help="default digits")
    add("--model", default="mlp", metavar="NAME", help="default mlp")
    add("--steps", type=launcher.at_least(1, int), metavar="N", help="default: those of the recipe")
    add("--seeds", type=launcher.at_least(2, int), default=3, metavar="N", help="from 0 on (default 3)")
    add("--ways", type=ways, default=WAYS, metavar="NAMES", help=f"with commas (default {WAYS})")
    add("--json", type=Path, metavar="FILE", help="write where every training has ended")
    return parser.parse_args(argv)


def ending(comm: Communicator, said: settings.Settings) -> dict[str, float]:
    """Train and test: the loss, and the accuracy in per cent if there are classes. Collective."""
    with Training(said, comm) as training:
        for _ in training.run():
            pass
        score = training.score()
    right = {} if score.accuracy is None else {"right, %": 100 * score.accuracy}
    return {"test loss": score.loss, **right}


def cells(ours: np.ndarray, others: np.ndarray) -> str:
    """Mean, standard deviation, and mean difference to the first one, as columns."""
    difference, spread = float(np.mean(ours - others)), float(others.std(ddof=1))
    apart = difference / spread if spread else math.copysign(math.inf, difference) if difference else 0.0
    return f"{ours.mean():.4g} ± {ours.std(ddof=1):.2g} | {apart:+.2f}"


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    comm = Communicator(MPI.COMM_WORLD)
    collective_call(comm, partial(resources.limit_threads, resources.cores_per_rank(comm)), "BLAS threads")
    usual = settings.complete({"data": args.data, "model": args.model, "steps": args.steps})
    say(f"{usual.model} on {usual.data}, {comm.Get_size()} ranks, {args.seeds} seeds: mean ± standard deviation\n")
    report: dict[str, list[dict[str, float]]] = {}
    for name in args.ways:
        report[name] = [ending(comm, replace(usual, compress=name, seed=seed)) for seed in range(args.seeds)]
        endings = {what: np.array([end[what] for end in report[name]]) for what in report[name][0]}
        if len(report) == 1:
            first = endings
            say(f"| `--compress` | {' | '.join(f'{what} | apart' for what in first)} |")
            say(f"| --- |{' --- | --- |' * len(first)}")
        say(f"| `{name}` | {' | '.join(cells(endings[what], first[what]) for what in first)} |")
    if comm.Get_rank() == 0:
        write(args.json, {"arguments": plain(args), "endings": report})
    return 0
