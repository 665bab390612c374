"""Time allreduces of quantised vectors against plain ones, and measure their errors.

chorus bench compressed -n 4
chorus bench compressed -n 4 --sizes 1M,16M --specs int8_g128,int4_g32 --ways two_shot,ring

All contestants take turns in one run: the MPI's own allreduce, ours, and every way with every encoding. `error` is the
norm of the error over the norm of the sum. `forecast` is the time expected before the run, and "auto" encodes where it
is below the time expected of a plain sum.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import quartiles
from collectives.benchmark.size_arguments import parse_sizes
from collectives.cli import launcher
from collectives.cli.arguments import names_of, shareable, specs
from collectives.cli.launcher import say
from collectives.compressed import (
    HierarchicalAllreduce,
    QuantCodec,
    RingAllreduce,
    SegmentedAllreduce,
    SharedScale,
    TwoShotAllreduce,
    run,
)
from collectives.compressed.compression_model import fitted, forecast
from collectives.units import format_bytes

WAYS = {
    "segmented": SegmentedAllreduce,
    "two_shot": TwoShotAllreduce,
    "ring": RingAllreduce,
    "hierarchical": HierarchicalAllreduce,
}
SHARED = "shared_scale"
PLAIN = ("native", "plain")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    add, ways = parser.add_argument, (*WAYS, SHARED)
    add("--sizes", type=parse_sizes, default=parse_sizes("1M,16M"), metavar="BYTES", help="of float32 (default 1M,16M)")
    add("--specs", type=specs, default="int8_g256,int4_g256", metavar="NAMES", help="default int8_g256,int4_g256")
    names = f"{', '.join(ways)} (default segmented)"
    add("--ways", type=names_of("way", ways), default="segmented", metavar="NAMES", help=names)
    add("--turns", type=launcher.at_least(1, int), default=15, metavar="N", help="of each (default 15)")
    args = parser.parse_args(argv)
    if SHARED in args.ways and (unfit := [name for name, spec in args.specs.items() if not shareable(spec)]):
        parser.error(
            f"argument --specs: {SHARED} is of symmetric linear codes from 2 bits on; found {', '.join(unfit)}"
        )
    return args


Sum = Callable[[np.ndarray, np.ndarray], object]


def _sum(encoded: Any, x: np.ndarray, out: np.ndarray) -> None:
    run(encoded.allreduce(x, out))


def race(comm: Communicator, nbytes: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all implementations on vectors of `nbytes` and measure their errors. Return a row for each. Collective."""
    count = nbytes // 4
    x = np.random.default_rng(comm.Get_rank()).standard_normal(count, np.float32)
    out, total = np.empty_like(x), np.empty_like(x)
    MPI.COMM_WORLD.Allreduce(x, total)
    found: dict[str, Sum] = {"native": MPI.COMM_WORLD.Allreduce, "plain": comm.Allreduce}
    seconds: dict[str, list[float]] = defaultdict(list)
    wrong = {}
    with ExitStack() as stack:
        for way, (name, spec) in product(args.ways, args.specs.items()):
            if way == SHARED:
                made: Any = SharedScale(comm, count, spec.bits, getattr(spec.granularity, "size", count) or 1)
            else:
                made = WAYS[way](comm, count, QuantCodec(spec))
            stack.callback(made.close)
            found[f"{way} {name}"] = partial(_sum, made)
        names = list(found)
        for turn in range(args.turns + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:  # none is always first
                MPI.COMM_WORLD.Barrier()
                began = time.perf_counter()
                found[name](x, out)
                spent = MPI.COMM_WORLD.allreduce(time.perf_counter() - began, MPI.MAX)
                if turn:
                    seconds[name].append(spent)
                else:
                    wrong[name] = float(np.linalg.norm(out - total)) / max(float(np.linalg.norm(total)), 1e-30)
    plain = seconds["plain"]
    return [
        {"name": name, "error": wrong[name], "ratio": float(np.median(np.divide(seconds[name], plain)))}
        | quartiles(seconds[name])
        for name in names
    ]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    comm = Communicator(MPI.COMM_WORLD)
    nodes, library = len(set(comm.nodes or (0,))), MPI.Get_library_version().splitlines()[0].strip()
    say(f"{comm.Get_size()} ranks on {nodes} node{'s' * (nodes > 1)}, {library}")
    wire = fitted(comm)
    for nbytes in args.sizes:
        expected = {name: forecast(comm, nbytes // 4, QuantCodec(spec), wire) for name, spec in args.specs.items()}
        say(f"\n{format_bytes(nbytes)}\n{'':28}{'ms':>9}  {'quartiles':>17}  {'/ plain':>7}  {'error':>8}")
        for row in race(comm, nbytes, args):
            spread = f"{1e3 * row['q1']:.3f} - {1e3 * row['q3']:.3f}"
            error = f"{row['error']:8.2%}" if row["name"] not in PLAIN else ""
            say(f"{row['name']:28}{1e3 * row['median']:9.3f}  {spread:>17}  {row['ratio']:7.3f}  {error:>8}")
        for name, made in expected.items():
            say(f"forecast for {name}: {made}: {'it pays' if made.pays else 'plain is quicker'}")
    return 0


if __name__ == "__main__":
    launcher.run(main)
