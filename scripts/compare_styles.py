"""Train the same model in every style that needs no server, and by data parallelism beside them: losses and distances.

mpirun -n 4 python scripts/compare_styles.py --plot styles.png

Every training has the settings of scripts/train.py for the same data and model. The distance is the root of the mean
square of the replicas' distances to their mean.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the slow imports: Ctrl-C is to end this quietly

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from benchlib import launch
from benchlib.launch import say
from collectives import Communicator
from collectives.selection.timing_file import machine as machine_in_words
from parallel import settings
from parallel.runtime import resources as machine
from parallel.decentralized.replica_engine import Replicas
from parallel.decentralized.styles import STYLES
from parallel.runtime.collective_errors import together
from parallel.trainer.trainer import Training

BESIDE = "dp"
"""What all styles are compared with."""

EVERY = 5
"""Steps from one look at the distance to the next: no multiple of the usual taus, so that it shows them at work."""

LAST = 20
"""Steps over which the loss in the end is averaged."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = launch.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", default="digits", metavar="NAME", help="default digits")
    add("--model", default="mlp", metavar="NAME", help="default mlp")
    add("--steps", type=int, metavar="N", help="default: those of the recipe")
    add("--styles", default=",".join(STYLES), metavar="NAMES", help=f"with commas (default {','.join(STYLES)})")
    add("--plot", type=Path, metavar="FILE", help="losses and distances as a picture")
    args = parser.parse_args(argv)
    unknown = set(args.styles.split(",")) - set(STYLES)
    if unknown:
        parser.error(f"--styles: expected names of {', '.join(STYLES)}, found {', '.join(sorted(unknown))}")
    return args


def course(comm: Communicator, said: settings.Settings) -> dict[str, Any]:
    """Train: mean losses of all ranks' steps, distances by step, and the accuracy in the end. Collective."""
    sums, distances = [], {}
    with Training(said, comm) as training:
        engine: Any = training.engine
        for record in training.run():
            report = record.report
            sums.append((report.loss * report.count if report.count else 0.0, report.count))
            if isinstance(engine, Replicas) and training.done % EVERY == 1:
                distances[training.done] = engine.consensus()
        total = np.array(sums)
        comm.Allreduce(MPI.IN_PLACE, total)
        score = training.score()
    return {"losses": (total[:, 0] / total[:, 1]).tolist(), "distances": distances, "score": score}


def main(argv: list[str] | None = None) -> int:
    """Train in one style after another, and show them together."""
    args = parse(argv)
    comm = Communicator(MPI.COMM_WORLD)
    together(comm, partial(machine.limit_threads, machine.cores_per_rank(comm)), "BLAS threads")
    usual = settings.complete({"data": args.data, "model": args.model, "steps": args.steps})
    say(f"| layout | test accuracy | loss of the last {LAST} steps | largest distance |")
    say("| --- | --- | --- | --- |")
    found = {}
    for name in (BESIDE, *args.styles.split(",")):
        found[name] = one = course(comm, replace(usual, layout=name))
        accuracy = "" if one["score"].accuracy is None else f"{one['score'].accuracy:.2%}"
        distance = f"{max(one['distances'].values(), default=0.0):.2g}"
        say(f"| `{name}` | {accuracy} | {np.mean(one['losses'][-LAST:]):.4f} | {distance} |")
    if args.plot and comm.Get_rank() == 0:
        from benchlib.plots import plot_styles

        title = f"{args.model} on {args.data}, {comm.Get_size()} ranks"
        plot_styles(args.plot, found, title, machine_in_words())
        say(f"{args.plot} drawn")
    return 0


if __name__ == "__main__":
    launch.run(main)
