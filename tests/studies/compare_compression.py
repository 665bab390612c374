"""Train a model with each gradient compression and without, with several seeds each, and compare the test results.

mpiexec -n 4 python tests/studies/compare_compression.py --seeds 5
mpiexec -n 2 python tests/studies/compare_compression.py --data pydoc --model gpt:tiny --steps 400 --ways none,int8,sign

Settings are those of `chorus train` for the data and model; all compressions share the seeds, and so the first weights
and the order of samples. `apart` is the mean difference to the first one, seed by seed, in standard deviations of the
first one over its seeds: a difference within 1 is no larger than that of another seed.
"""

import argparse
import math
from dataclasses import replace

import numpy as np
from mpi4py import MPI
from recipes import add_recipe, recipe_settings

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import say
from parallel.engine.grad_compression import AUTO, NONE, parse
from parallel.engine.settings import Settings
from parallel.trainer.trainer import Training

WAYS = "none,int8,int4,sign,topk:0.01,powersgd:2,qsgd:4,terngrad"  # default of --ways


def ways(text: str) -> list[str]:
    """Argument type of --ways: comma-separated names of gradient compressions, as for `--compress`."""
    for name in (names := text.split(",")):
        try:
            if name not in (NONE, AUTO):
                parse(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def final_score(comm: Communicator, settings: Settings) -> dict[str, float]:
    """Train with these settings; returns the test loss and, for classifiers, the accuracy in per cent. Collective."""
    with Training(settings, comm) as training:
        for _ in training.run():
            pass
        score = training.score()
    right = {} if score.accuracy is None else {"right, %": 100 * score.accuracy}
    return {"test loss": score.loss, **right}


def cells(ours: np.ndarray, others: np.ndarray) -> str:
    """Format scores by seed: mean ± deviation, and mean difference to `others` in standard deviations of `others`."""
    difference, spread = float(np.mean(ours - others)), float(others.std(ddof=1))
    apart = difference / spread if spread else math.copysign(math.inf, difference) if difference else 0.0
    return f"{ours.mean():.4g} ± {ours.std(ddof=1):.2g} | {apart:+.2f}"


def main(argv: list[str] | None = None) -> int:
    parser = launcher.LauncherParser(__doc__)
    add_recipe(parser)
    add = parser.add_argument
    add("--seeds", type=launcher.at_least(2, int), default=3, metavar="N", help="number of seeds (default 3)")
    add("--ways", type=ways, default=WAYS, metavar="NAMES", help=f"with commas (default {WAYS})")
    args = parser.parse_args(argv)
    comm = Communicator(MPI.COMM_WORLD)
    base = recipe_settings(args, comm)
    say(f"{base.model} on {base.data}, {comm.Get_size()} ranks, {args.seeds} seeds: mean ± standard deviation\n")
    first: dict[str, np.ndarray] = {}
    for name in args.ways:
        runs = [final_score(comm, replace(base, compress=name, seed=seed)) for seed in range(args.seeds)]
        scores = {key: np.array([score[key] for score in runs]) for key in runs[0]}
        if not first:
            first = scores
            say(f"| `--compress` | {' | '.join(f'{key} | apart' for key in first)} |")
            say(f"| --- |{' --- | --- |' * len(first)}")
        say(f"| `{name}` | {' | '.join(cells(scores[key], first[key]) for key in first)} |")
    return 0


if __name__ == "__main__":
    launcher.run(main)
