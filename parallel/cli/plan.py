"""Forecast a training without running it: partition of the model, work per step, and memory of every rank.

chorus plan -n 4 --data digits --model mlp
chorus plan -n 4 --data pydoc --model gpt:small --layout zero3
chorus plan -n 4 --data pydoc --model gpt:small --layout pp:zb-h1

Options and defaults are those of `chorus train`. A pipeline measures the units of the model to cut it, like the
training. Nothing is written.
"""

from itertools import groupby

from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import say
from collectives.units import short
from parallel.cli.train import describe, limit_threads
from parallel.cli.train_arguments import add_settings, threads_error
from parallel.engine import settings
from parallel.engine.memory_ledger import KINDS
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import TrainingPlan

USUAL = ("data", "model", "layout", "mesh", "batch", "length", "precision", "optimizer", "recompute")
"""Options in --help. --help-all has the others."""

COLUMNS = (*KINDS, "temporaries")

NOT_COUNTED = (
    "not counted: the process (libraries and compiled kernels, about 200 MB), and what it reads of other ranks"
)
"""Memory that forecasts leave out. The resident size of a process includes shared pages of other ranks."""


def table(needed: list[dict[str, int]]) -> str:
    """Format forecast bytes by rank and kind as a table in MB. Consecutive ranks with equal memory share a row.

    >>> print(table([{"parameters": 2_000_000}] * 2).splitlines()[1])
    0-1                2.00         0.00         0.00         0.00         0.00         0.00         2.00
    """
    rows = [f"{'rank':10}" + "".join(f"{name:>13}" for name in (*COLUMNS, "total"))]
    for memory, group in groupby(range(len(needed)), lambda rank: needed[rank]):
        first, *others = group
        name = f"{first}-{others[-1]}" if others else str(first)
        values = [*(memory.get(kind, 0) for kind in COLUMNS), sum(memory.values())]
        rows.append(f"{name:10}" + "".join(f"{value / 1e6:13.2f}" for value in values))
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    """Print the forecast of a training. Exit status 2 if the settings are invalid."""
    parser = launcher.LauncherParser(__doc__, USUAL, usage="%(prog)s [options]")
    add_settings(parser)
    args = parser.parse_args(argv)
    if problem := threads_error(args):
        parser.error(problem)
    comm = Communicator(MPI.COMM_WORLD)
    try:
        chosen = complete({name: getattr(args, name, None) for name in settings.OPTIONS})
        limit_threads(comm, args, chosen)
        plan = TrainingPlan(chosen, comm)
    except ValueError as error:
        parser.error(str(error))
    describe(comm, args, plan)
    say(f"a step: {short(plan.flops_per_sample * chosen.batch)} FLOPs")
    needed = comm.gather(dict(plan.forecast.needed))
    if needed is not None:
        say("memory by rank, in MB:")
        say(table(needed))
        say(NOT_COUNTED)
    return 0
