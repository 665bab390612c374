"""Measure scaling on the ranks here, of which each point takes the first few: replicas, 1F1B, allreduce, servers.

scripts/cluster --hosts 4 -- python scripts/measure_scaling.py --output out/measured.json
chorus plan --scaling --cluster h100:64 --model gpt2-xl --measured out/measured.json --plot out/scaling.png

Points have the names of the tables of `chorus plan --scaling`, which adds them to its own. Replicas have ZeRO-1 and
mlp:medium; pipelines gpt:small, of which the share that they compute is the time of one rank over that of all.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.size_arguments import parse_size
from collectives.cli import launcher
from collectives.cli.launcher import say
from parallel.engine.settings import complete
from parallel.forecast.core_sharing import measured
from parallel.forecast.measured_messages import median_seconds
from parallel.planner.scaling import (
    BANDWIDTH,
    EXCHANGES,
    PIPELINES,
    REPLICAS,
    SERVERS,
    ScalingTables,
    powers_of_two,
)
from parallel.runtime.resources import limit_threads
from parallel.runtime.vector_memory import keep_freed_memory
from parallel.trainer.trainer import Training

T = TypeVar("T")

STEPS, WARM_UP = 12, 3
"""Steps of a training, the first of which do not count; the median of the others does."""

MLP = {"data": "digits", "model": "mlp:medium", "layout": "zero1", "dropout": 0.0}
GPT = {"data": "pydoc", "model": "gpt:small", "length": 64, "batch": 8}
BATCH, MICROBATCHES = 64, (1, 2, 4, 8)


class RankPrefixes:
    """First ranks of a communicator that run something, while the others sleep. All methods are collective."""

    def __init__(self, comm: Communicator):
        self._comm, self._rank = comm, comm.Get_rank()
        self._prefixes = {count: comm.Split(int(self._rank >= count), self._rank) for count in self.counts}

    @property
    def counts(self) -> list[int]:
        return powers_of_two(self._comm.Get_size())

    def results(self, count: int, run: Callable[[Communicator], T]) -> list[T]:
        """Results of `run` on the first `count` ranks, in a communicator of these."""
        return measured(self._comm, self._rank < count, partial(run, self._prefixes[count]))

    def seconds(self, count: int, run: Callable[[Communicator], float]) -> float:
        """Seconds that `run` returns on the slowest of the first `count` ranks."""
        return float(max(self.results(count, run)))


def step_seconds(options: dict[str, object], comm: Communicator) -> float:
    """Median seconds of a step. Collective."""
    with Training(complete(options | {"steps": STEPS}), comm) as training:
        return median([record.seconds for record in training.run()][WARM_UP:])


def allreduce_seconds(nbytes: int, algorithm: str, comm: Communicator) -> float:
    """Median seconds of an allreduce of float32. Collective."""
    vector = np.zeros(nbytes // 4, np.float32)
    return median_seconds(comm, lambda: comm.Allreduce(MPI.IN_PLACE, vector, algorithm=algorithm))


def measure(ranks: RankPrefixes, nbytes: int, gradients: int, algorithms: Iterable[str]) -> ScalingTables:
    """All points: bytes of the allreduce over nodes, and of the gradients. Collective."""
    several = ranks.counts[1:]
    weak, strong = (
        {n: ranks.seconds(n, partial(step_seconds, MLP | {"batch": BATCH * (1 if fixed else n)})) for n in ranks.counts}
        for fixed in (False, True)
    )
    alone = ranks.seconds(1, partial(step_seconds, GPT | {"layout": "dp"}))
    pipelines = {
        f"{stages} stages": {
            m: alone
            / stages
            / ranks.seconds(stages, partial(step_seconds, GPT | {"layout": "pp:1f1b", "microbatches": m}))
            for m in MICROBATCHES
        }
        for stages in several
    }
    allreduces = {name: partial(allreduce_seconds, nbytes, name) for name in algorithms}
    bandwidths = {
        name: {n: 2e-9 * (n - 1) / n * nbytes / ranks.seconds(n, run) for n in several}
        for name, run in allreduces.items()
    }
    exchanges = {
        name: {n: ranks.seconds(n, partial(allreduce_seconds, gradients, algorithm)) for n in several}
        for name, algorithm in SERVERS.items()
    }
    return {
        REPLICAS: {
            "weak": {n: weak[1] / seconds for n, seconds in weak.items()},
            "strong": {n: strong[1] / n / seconds for n, seconds in strong.items()},
        },
        PIPELINES: pipelines,
        BANDWIDTH: bandwidths,
        EXCHANGES: exchanges,
    }


def main(argv: list[str] | None = None) -> int:
    """Measure on all ranks, and write the points."""
    parser = launcher.LauncherParser(__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="points, JSON")
    add("--bytes", type=parse_size, default="256M", metavar="SIZE", help="of the allreduce over nodes (default 256M)")
    add("--gradients", type=parse_size, default="16M", metavar="SIZE", help="of the sums by servers (default 16M)")
    args = parser.parse_args(argv)
    keep_freed_memory()
    limit_threads(1)
    comm = Communicator(MPI.COMM_WORLD)
    if comm.Get_size() < 2:
        parser.error("expected 2 ranks or more, found 1")
    found = measure(RankPrefixes(comm), args.bytes, args.gradients, ("ring", "rabenseifner", "mst", "linear"))
    if comm.Get_rank() == 0:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    say(f"{args.output} written")
    return 0
