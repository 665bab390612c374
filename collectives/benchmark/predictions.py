"""Predicted times of algorithms at any number of ranks: simulated, or by formula where simulation is too slow."""

from functools import lru_cache
from typing import NamedTuple

from collectives.algorithms import catalog
from collectives.analysis.cost_functions import ClusteredNetwork, LinearCost
from collectives.analysis.simulate_large import VectorSimulator
from collectives.schedule.chunks import ChunkLayout
from collectives.schedule.topology import regular
from collectives.selection.expected_time import TimedCall

FEW_ROUNDS, LARGEST = 6, 1 << 17
"""A schedule of up to `LARGEST` ranks is simulated if it has at most `FEW_ROUNDS` times log2 p rounds."""

MESSAGES = 1 << 17
"""Ranks times rounds up to which any schedule is simulated."""

CHUNKS = 1 << 18
"""Chunks of all ranks together up to which a schedule is simulated: an alltoall has p^2."""

RANGES = 1 << 22
"""Ranges of blocks of all messages up to which a strided schedule is simulated: there are ranks times nodes."""

SAMPLE = 64
"""Least number of ranks in the simulation that calibrates a formula for nodes."""


class CostPrediction(NamedTuple):
    """Cost parameters of a cluster of equal nodes: messages within and between nodes, and reduction per byte."""

    per_node: int  # ranks on a node; the last node may have fewer
    node: LinearCost  # a message within a node
    network: LinearCost  # a message between nodes, whose card all ranks of a node share
    gamma: float  # seconds to combine a byte

    def of(self, size: int) -> ClusteredNetwork:
        return ClusteredNetwork(regular(size, self.per_node), self.node, self.network, LinearCost(0, self.gamma))


class PredictionRow(NamedTuple):
    """Predicted cost of one algorithm for one number of ranks and one array size."""

    algorithm: str
    size: int
    nbytes: int
    rounds: int  # messages that wait for one another
    volume: int  # bytes that the busiest rank sends or receives, whichever is more
    traffic: int | None  # bytes that all ranks send together; None where it is not known
    seconds: float
    bound: float  # seconds that no algorithm can beat
    simulated: bool  # rather than calculated by formula


def layout_of(collective: str, name: str, size: int, nbytes: int, segments: int = 1) -> ChunkLayout:
    """Byte ranges of the chunks; `nbytes` is the whole vector, or all blocks, or (alltoall) the blocks of one rank."""
    return TimedCall(collective, name, segments, size, nbytes).layout


def is_quick_to_simulate(collective: str, name: str, size: int, nodes: int = 1) -> bool:
    """True if an algorithm on `size` ranks of `nodes` nodes can be simulated in a few seconds, by estimate."""
    entry = catalog.find(collective, name)
    rounds = catalog.evaluate(entry.rounds, size, 1, nodes)
    if catalog.blocks(collective, name, size) > max(size, CHUNKS):
        return False
    if entry.strided and 1 < nodes < size and nodes * size > RANGES:
        return False
    return rounds * size <= MESSAGES or (size <= LARGEST and rounds <= FEW_ROUNDS * size.bit_length())


@lru_cache(maxsize=32)
def _simulator(collective: str, name: str, size: int, per_node: int) -> VectorSimulator:
    """Simulator of all ranks of an algorithm, with root 0."""
    nodes = regular(size, per_node) if size > per_node else None
    symmetry = catalog.symmetry_of(collective, name, size, nodes)
    ranks = range(size) if symmetry is None else symmetry.ranks
    return VectorSimulator(catalog.rounds_of(ranks, collective, name, size, nodes=nodes), symmetry)


def simulated_seconds(collective: str, name: str, size: int, nbytes: int, model: CostPrediction) -> float:
    simulator = _simulator(collective, name, size, model.per_node)
    return float(simulator.price(layout_of(collective, name, size, nbytes), 1, model.of(size)).max())


def traffic(collective: str, name: str, size: int, nbytes: int, model: CostPrediction) -> int | None:
    """Bytes that all ranks send together: counted, or by formula where the schedule is too large and has one."""
    if is_quick_to_simulate(collective, name, size, -(-size // model.per_node)):
        layout = layout_of(collective, name, size, nbytes)
        return _simulator(collective, name, size, model.per_node).traffic(layout, 1)
    total = catalog.find(collective, name).total
    return round(catalog.evaluate(total, size) * nbytes) if total else None


def by_formula(collective: str, name: str, size: int, nbytes: int, model: CostPrediction) -> float:
    """Predicted seconds of an algorithm by its cost formula; across nodes scaled to a simulation of a few nodes.

    The simulation accounts for cheaper messages within nodes, and for the cost of a shared card. alpha and beta are
    scaled separately, each by the ratio of simulation to formula.
    """
    entry = catalog.find(collective, name)
    if size <= model.per_node:
        return float(entry.seconds(size, nbytes, *model.node, model.gamma))
    scaled = {}
    for cost, other in (("alpha", "beta"), ("beta", "alpha")):
        node, network = (wire._replace(**{other: 0.0}) for wire in (model.node, model.network))
        alone = CostPrediction(model.per_node, node, network, 0.0)
        scaled[cost] = getattr(network, cost) * _weight(collective, name, alone)
    return float(entry.seconds(size, nbytes, **scaled, gamma=model.gamma))


@lru_cache(maxsize=256)
def _weight(collective: str, name: str, model: CostPrediction) -> float:
    """Ratio of an algorithm's simulated time on a few nodes to the time by its cost formula; 1.0 if that is zero."""
    size, nbytes = max(SAMPLE, 4 * model.per_node), 1 << 20
    expected = catalog.find(collective, name).seconds(size, nbytes, *model.network, 0.0)
    return simulated_seconds(collective, name, size, nbytes, model) / float(expected) if expected else 1.0


def bound(collective: str, size: int, nbytes: int, model: CostPrediction) -> float:
    """Lower bound in seconds for any algorithm of a collective: the largest by latency, bandwidth or reduction."""
    if size == 1:
        return 0.0
    least, nodes = catalog.BOUNDS[collective], size // model.per_node
    cheapest = LinearCost(*map(min, model.node, model.network)) if nodes else model.node
    per_node = nbytes * (model.per_node if collective == "alltoall" else 1)  # what the ranks of a node hold together
    seconds = [nbytes * float(catalog.evaluate(least.combined, size)) * model.gamma]
    for ends, held, wire in ((size, nbytes, cheapest), (nodes, per_node, model.network)):
        if ends > 1:
            seconds.append(float(catalog.evaluate(least.rounds, ends)) * wire.alpha)
            seconds.append(float(catalog.evaluate(least.volume, ends)) * held * wire.beta)
    return max(seconds)


def row(collective: str, name: str, size: int, nbytes: int, model: CostPrediction) -> PredictionRow:
    entry, nodes = catalog.find(collective, name), -(-size // model.per_node)
    simulated = is_quick_to_simulate(collective, name, size, nodes)
    seconds = (simulated_seconds if simulated else by_formula)(collective, name, size, nbytes, model)
    rounds, volume = (catalog.evaluate(formula, size, 1, nodes) for formula in (entry.rounds, entry.volume))
    least = bound(collective, size, nbytes, model)
    together = traffic(collective, name, size, nbytes, model)
    return PredictionRow(name, size, nbytes, int(rounds), round(volume * nbytes), together, seconds, least, simulated)
