"""Measure scaling on the ranks here, of which each point takes the first few: replicas, 1F1B, allreduce, servers.

chorus plan --measure-scaling out/measured.json -n 4
chorus plan --scaling --cluster h100:64 --model gpt2-xl --measured out/measured.json --plot out/scaling.png

Points have the names of the tables of `chorus plan --scaling`, which adds them to its own. Replicas have ZeRO-1. The
share that a pipeline computes is the time of one rank over that of all.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import check_writable, write
from collectives.benchmark.size_arguments import parse_size
from collectives.cli import launcher
from collectives.cli.launcher import say
from parallel.planning.analytic.scaling import (
    BANDWIDTH,
    EXCHANGES,
    PIPELINES,
    REPLICAS,
    SERVERS,
    ScalingTables,
    powers_of_two,
)
from parallel.planning.measured.core_sharing import measured
from parallel.planning.measured.measured_messages import median_seconds
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.resources import limit_threads
from parallel.runtime.vector_memory import keep_freed_memory
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training

T = TypeVar("T")

STEPS, WARM_UP = 12, 3
"""Steps of a training, the first of which do not count. The median of the others does."""

MLP = {"data": "digits", "layout": "zero1", "dropout": 0.0}
GPT = {"data": "pydoc", "length": 64, "batch": 8}
BATCH, MICROBATCHES = 64, (1, 2, 4, 8)

ALGORITHMS = ("ring", "rabenseifner", "mst", "linear")
"""Algorithms of the allreduce over nodes."""


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


class ScaledSizes(NamedTuple):
    """Bytes of the allreduce over nodes and of the gradients. Models of replicas and of pipelines."""

    nbytes: int
    gradients: int
    replicas: str
    pipelines: str


def step_seconds(options: dict[str, object], comm: Communicator) -> float:
    """Median seconds of a step. Collective."""
    with Training(complete(options | {"steps": STEPS}), comm) as training:
        return median([record.seconds for record in training.run()][WARM_UP:])


def allreduce_seconds(nbytes: int, algorithm: str, comm: Communicator) -> float:
    """Median seconds of an allreduce of float32. Collective."""
    vector = np.zeros(nbytes // 4, np.float32)
    return median_seconds(comm, lambda: comm.Allreduce(MPI.IN_PLACE, vector, algorithm=algorithm))


def measure(ranks: RankPrefixes, sizes: ScaledSizes, algorithms: Iterable[str] = ALGORITHMS) -> ScalingTables:
    """All points. Collective."""
    # one rank has no pipeline and sends no message
    several, mlp, gpt = ranks.counts[1:], MLP | {"model": sizes.replicas}, GPT | {"model": sizes.pipelines}
    weak, strong = (
        {n: ranks.seconds(n, partial(step_seconds, mlp | {"batch": BATCH * (1 if fixed else n)})) for n in ranks.counts}
        for fixed in (False, True)
    )
    alone = ranks.seconds(1, partial(step_seconds, gpt | {"layout": "dp"}))
    pipelines = {
        f"{stages} stages": {
            m: alone
            / stages
            / ranks.seconds(stages, partial(step_seconds, gpt | {"layout": "pp:1f1b", "microbatches": m}))
            for m in MICROBATCHES
        }
        for stages in several
    }
    allreduces = {name: partial(allreduce_seconds, sizes.nbytes, name) for name in algorithms}
    bandwidths = {
        name: {n: 2e-9 * (n - 1) / n * sizes.nbytes / ranks.seconds(n, run) for n in several}
        for name, run in allreduces.items()
    }
    exchanges = {
        name: {n: ranks.seconds(n, partial(allreduce_seconds, sizes.gradients, algorithm)) for n in several}
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
    parser = launcher.LauncherParser(__doc__, usage="%(prog)s FILE [options]")
    add = parser.add_argument
    add("--measure-scaling", type=Path, required=True, metavar="FILE", help="points to write, JSON")
    add("--bytes", type=parse_size, default="256M", metavar="SIZE", help="of the allreduce over nodes (default 256M)")
    add("--gradients", type=parse_size, default="16M", metavar="SIZE", help="of the sums by servers (default 16M)")
    add("--replicas", default="mlp:medium", metavar="MODEL", help="of replicas (default mlp:medium)")
    add("--pipelines", default="gpt:small", metavar="MODEL", help="of pipelines (default gpt:small)")
    args = parser.parse_args(argv)
    comm = Communicator(MPI.COMM_WORLD)
    collective_call(comm, partial(check_writable, args.measure_scaling), "--measure-scaling", root=0)
    keep_freed_memory()
    limit_threads(1)
    sizes = ScaledSizes(args.bytes, args.gradients, args.replicas, args.pipelines)
    found = measure(RankPrefixes(comm), sizes)
    collective_call(comm, partial(write, args.measure_scaling, found), "--measure-scaling", root=0)
    say(f"{args.measure_scaling} written")
    return 0
