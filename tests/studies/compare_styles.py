"""Train a model with each decentralised averaging style and with data parallelism; compare losses and distances.

mpiexec -n 4 python tests/studies/compare_styles.py --plot styles.png

Settings are those of `chorus train` for the data and model. The distance is the root mean square of the replicas'
distances to their mean.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from recipes import add_recipe, recipe_settings

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import say
from collectives.selection.timing_file import machine
from parallel.asynchronous.decentralized.replica_engine import ReplicaEngine
from parallel.engine.settings import Settings
from parallel.trainer.trainer import Training

BESIDE = "dp"  # layout that the styles are compared with

STYLES = ("local", "group", "sgp", "hogwild")  # those whose steps are as long as data parallelism's

EVERY = 5
"""Steps between two measurements of the distance; no multiple of the default taus, which would hide their effect."""

LAST = 20  # steps whose losses make the final loss


def history(comm: Communicator, settings: Settings) -> dict[str, Any]:
    """Train; returns losses by step, distances of replicas every `EVERY` steps, and test score, by name. Collective."""
    sums, distances = [], {}
    with Training(settings, comm) as training:
        engine: Any = training.engine
        for record in training.run():
            report = record.report
            sums.append((report.loss * report.count if report.count else 0.0, report.count))
            if isinstance(engine, ReplicaEngine) and training.done % EVERY == 1:
                distances[training.done] = engine.consensus()
        total = np.array(sums)
        comm.Allreduce(MPI.IN_PLACE, total)
        score = training.score()
    return {"losses": (total[:, 0] / total[:, 1]).tolist(), "distances": distances, "score": score}


def main() -> int:
    """Train with data parallelism and with every averaging style; print a table of results and perhaps plot them."""
    parser = launcher.LauncherParser(__doc__)
    add_recipe(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="losses and distances as a picture")
    args = parser.parse_args()
    comm = Communicator(MPI.COMM_WORLD)
    base = recipe_settings(args, comm)
    say(f"| layout | test accuracy | loss of the last {LAST} steps | largest distance |")
    say("| --- | --- | --- | --- |")
    found = {}
    for name in (BESIDE, *STYLES):
        found[name] = one = history(comm, replace(base, layout=name))
        accuracy = "" if one["score"].accuracy is None else f"{one['score'].accuracy:.2%}"
        distance = f"{max(one['distances'].values(), default=0.0):.2g}"
        say(f"| `{name}` | {accuracy} | {np.mean(one['losses'][-LAST:]):.4f} | {distance} |")
    if args.plot and comm.Get_rank() == 0:
        from study_plots import plot_styles

        title = f"{args.model} on {args.data}, {comm.Get_size()} ranks"
        plot_styles(args.plot, found, title, machine())
        say(f"{args.plot} drawn")
    return 0


if __name__ == "__main__":
    launcher.run(main)
