"""Predicted scaling: data parallelism, pipelines, allreduce over nodes, and parameter servers, as tables of numbers."""

import json
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import NamedTuple, TypeAlias

from collectives.algorithms import catalog
from parallel.pipeline.schedule.formulas import FORMULAS, evaluate
from parallel.planning.analytic.layout import ClusterLayout
from parallel.planning.analytic.machines import Cluster
from parallel.planning.analytic.search import heaviest
from parallel.planning.analytic.step_time import Setup, step_time
from parallel.planning.analytic.transformer import Transformer

ScalingTables: TypeAlias = dict[str, dict[str, dict[int, float]]]
"""Numbers by table, line and position on the horizontal axis."""

REPLICAS = "share of ideal throughput, by replicas"
PIPELINES = "share of a step that 1F1B computes, by micro-batches"
BANDWIDTH = "bus bandwidth of a 256 MiB allreduce in GB/s, by nodes"
EXCHANGES = "seconds to sum the gradients, by workers"

MEASURED = ", measured"
"""End of the names of measured lines."""

SUMS = {
    "linear": "to one rank and back",
    "binary_tree": "binary tree",
    "mst": "binomial tree",
    "direct": "K reduces",
    "ring": "ring",
    "rabenseifner": "butterfly",
}
"""Algorithms of allreduce that are compared, with their usual names.

"k reduces": one for each rank's part of the vector, all at once.
"""

SERVERS = {"one server": "linear", "as many servers as workers": "direct", "allreduce": "ring"}
"""Algorithms of allreduce that move what each arrangement moves: all gradients to one rank, or a part to each."""


def powers_of_two(most: int) -> list[int]:
    """Powers of two from 1 up to `most`.

    >>> powers_of_two(10)
    [1, 2, 4, 8]
    """
    return [1 << power for power in range(most.bit_length())]


def sequences_per_second(model: Transformer, setup: Setup, dp: int, sequences: int) -> float:
    """Sequences per second of `dp` replicas with ZeRO-1. A step has `sequences` sequences, one in a micro-batch."""
    layout = ClusterLayout(dp=dp, zero=1)
    return sequences / step_time(model, layout, setup, sequences, heaviest(model, layout)).total


def replica_efficiency(
    model: Transformer, setup: Setup, counts: Iterable[int], batch: int, *, strong: bool
) -> dict[int, float]:
    """Throughput of each number of replicas, as a share of that many times one replica's.

    `batch`: sequences of a whole step (`strong` scaling), or of each replica (weak scaling). Numbers that do
    not divide a whole step are left out.
    """
    alone = sequences_per_second(model, setup, 1, batch)
    return {
        dp: sequences_per_second(model, setup, dp, batch if strong else batch * dp) / (dp * alone)
        for dp in counts
        if not strong or batch % dp == 0
    }


def pipeline_efficiency(stages: int, microbatches: int) -> float:
    """Share of a step in which a stage computes: of 1F1B, m/(m + p - 1)."""
    work = 2 * microbatches
    return float(work / (work + evaluate(FORMULAS["1f1b"].idle, p=stages, m=microbatches, F=1, B=1, W=0)))


def bus_bandwidth(cluster: Cluster, nodes: int, nbytes: int, algorithm: str) -> float:
    """Bytes per second that an allreduce among `nodes` nodes, one rank on each, moves: 2(p-1)/p n over its time."""
    alpha, beta = cluster.between.cost
    seconds = catalog.find("allreduce", algorithm).seconds(nodes, nbytes, alpha, beta, 0.0)
    return float(2 * (nodes - 1) / nodes * nbytes / seconds)


class SumCost(NamedTuple):
    """Cost of an allreduce of n bytes: seconds, bus bandwidth in bytes per second, and traffic in units of n.

    Traffic is what the busiest rank sends or receives, and what all ranks send together.
    """

    seconds: float
    bandwidth: float
    busiest: float
    traffic: float


def sum_costs(cluster: Cluster, nodes: int, nbytes: int) -> dict[str, SumCost]:
    """Costs of the algorithms of `SUMS` among `nodes` nodes, one rank on each."""
    alpha, beta = cluster.between.cost
    found = {}
    for name in SUMS:
        entry = catalog.find("allreduce", name)
        seconds = float(entry.seconds(nodes, nbytes, alpha, beta, 0.0))
        busiest, traffic = (float(catalog.evaluate(each, nodes)) for each in (entry.volume, entry.total))
        found[name] = SumCost(seconds, bus_bandwidth(cluster, nodes, nbytes, name), busiest, traffic)
    return found


def exchange_seconds(cluster: Cluster, workers: int, nbytes: int) -> dict[str, float]:
    """Seconds to sum gradients of `nbytes` among workers, one on a node, by arrangement (`SERVERS`)."""
    alpha, beta = cluster.between.cost
    return {
        name: float(catalog.find("allreduce", algorithm).seconds(workers, nbytes, alpha, beta, 0.0))
        for name, algorithm in SERVERS.items()
    }


def with_measured(predicted: ScalingTables, path: Path) -> ScalingTables:
    """Tables with the points of a file of `chorus plan --measure-scaling` added. ValueError if it has another form."""
    try:
        found = json.loads(path.read_text())
        points = {
            title: {f"{name}{MEASURED}": {int(x): float(y) for x, y in line.items()} for name, line in lines.items()}
            for title, lines in found.items()
        }
        if not all(  # json reads NaN, and the axis of x is logarithmic
            isfinite(y) and x > 0 for lines in points.values() for line in lines.values() for x, y in line.items()
        ):
            raise ValueError
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "another form"
        raise ValueError(f"--measured: expected points of --measure-scaling, found {str(path)!r}: {reason}") from None
    if unknown := points.keys() - predicted.keys():
        raise ValueError(f"--measured: {path}: expected tables out of {', '.join(predicted)}; found {unknown.pop()!r}")
    return {title: lines | points.get(title, {}) for title, lines in predicted.items()}
