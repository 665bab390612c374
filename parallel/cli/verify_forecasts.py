"""Check that the memory forecast of random trainings is their ledger, to the byte, on every rank.

    chorus verify --forecasts 200 -n 3 --seed 0

A seed draws layout (every strategy in turn), model, data, mesh, precision, optimizer, sizes of micro-batches and
buckets, and, where they go with these, transforms, kinds of blocks and compressed gradients. After two steps the
forecast, made before the first one, is compared with the bytes that the engine expected and allocated. Exit status 1 if
one differs.
"""

import time

from mpi4py import MPI

from collectives import Communicator
from collectives.cli.launcher import LauncherParser, at_least, say
from parallel.cli.conformance.random_training import draw_settings, forecast_difference
from parallel.engine.settings import DEFAULTS, OPTIONS


def main() -> int:
    """Verify forecasts; exit status 1 if one is not the ledger."""
    parser = LauncherParser(__doc__, usage="%(prog)s N [options]")
    add = parser.add_argument
    add("--forecasts", type=at_least(1, int), required=True, metavar="N", help="number of trainings")
    add("--seed", type=at_least(0, int), default=0, metavar="S", help="the first one (default 0)")
    args = parser.parse_args()
    began, failures = time.perf_counter(), 0
    with Communicator(MPI.COMM_WORLD) as comm:
        for seed in range(args.seed, args.seed + args.forecasts):
            settings = draw_settings(seed, comm.Get_size())
            texts = comm.allgather(forecast_difference(settings, comm))
            if any(texts):
                failures += 1
                changed = {name: getattr(settings, name) for name in OPTIONS}
                words = [f"{name}={value}" for name, value in changed.items() if value != getattr(DEFAULTS, name)]
                say(f"seed {seed} fails: {' '.join(words)}")
                for rank, text in enumerate(texts):
                    say(f"  rank {rank}: {text}" if text else f"  rank {rank}: equal")
    count = args.forecasts
    say(f"{count - failures} of {count} forecasts are the ledger ({time.perf_counter() - began:.0f} s)")
    return int(failures > 0)
