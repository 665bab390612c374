"""Selection of algorithm and segments of a call: measured times, otherwise the cost model. Equal on all ranks.

It uses only what is equal on all ranks: the traits of the call, the number of ranks, their placement, a table that all
ranks received from rank 0, and costs that all ranks measured together.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

from mpi4py import MPI

from collectives.algorithms import catalog
from collectives.analysis.cost_functions import UniformNetwork
from collectives.analysis.simulate import price
from collectives.errors import InvalidArgument
from collectives.schedule.chunks import ChunkLayout, even
from collectives.schedule.semantics import MEANINGS, vector
from collectives.schedule.topology import Nodes
from collectives.selection.cost_model import BUILT_IN, CALL, Costs, network, uniform_network
from collectives.selection.exchanges import exchange_seconds
from collectives.selection.shared_cores import core_time, predict_on_shared_cores, without_core_time
from collectives.selection.shared_link import predict_on_shared_link
from collectives.selection.timing_table import BLOCKING, NATIVE, AlgorithmChoice, TimingTable, interpolate
from collectives.transport.node.mailbox import RENDEZVOUS_BYTES

MOST_SEGMENTS = 64
"""Limit of segments. Each segment has its own messages to bind."""

TYPICAL_BLOCK = 1024
"""Assumed bytes of a block where ranks know only their own block's length."""

SIMULATED_RANKS = 64
"""Most ranks to simulate for an algorithm that uses the topology. Larger clusters are represented by a part."""

NATIVE_BYTES = 1 << 31
"""Bytes from which counts are too large for some MPIs."""

_V_FORMS = {"scatterv": "scatter", "gatherv": "gather", "allgatherv": "allgather", "alltoallv": "alltoall"}


class Selection(NamedTuple):
    """Algorithm that ``"auto"`` selects, its predicted `seconds`, and their `source`, ``"measured"`` or ``"model"``."""

    algorithm: str
    segments: int
    seconds: float
    source: str

    @property
    def choice(self) -> AlgorithmChoice:
        """Algorithm and segments."""
        return AlgorithmChoice(self.algorithm, self.segments)


class CallTraits(NamedTuple):
    """Properties of a call that decide its algorithm, equal on all ranks."""

    collective: str  #: name in the catalogue
    nbytes: int  #: of the whole vector, or of all blocks that one rank holds (ignored with `local_counts`)
    ordered: bool = False  #: the operation needs rank order
    local_counts: bool = False  #: ranks know only their own block's length
    native: bool = False  #: the MPI's own collective may be taken, if it was measured to be the fastest
    form: str = BLOCKING
    v_form: bool = False  #: blocks may have any length
    shared: bool = False  #: all buffers are in shared memory (tables measure ordinary memory)
    in_place: bool = False  #: the shared buffers are used in place on all ranks


class Selector:
    """Selector of ``algorithm="auto"`` for one communicator, with a cache of choices.

    `nodes` is None if all ranks are on one node. `table` is the same on all ranks. Without one the model decides, at
    `costs` (also the same on all ranks). `cores`: number of cores that all ranks share (one node, or emulated nodes
    of one rank each), if less than the number of ranks. `shares_link`: all messages are copied from and to one GPU.
    """

    def __init__(
        self,
        size: int,
        nodes: Nodes | None = None,
        table: TimingTable | None = None,
        cores: int | None = None,
        costs: Costs = BUILT_IN,
        shares_link: bool = False,
    ) -> None:
        self.size, self.nodes, self.table = size, nodes, table
        self._mixed = None if nodes is None or uniform_network(nodes, BUILT_IN) else sample(nodes, SIMULATED_RANKS)
        """Placement that predictions assume if not all edges are equal. Otherwise None."""

        self.cores = cores if size <= SIMULATED_RANKS and self._mixed is None else None
        self.shares_link = shares_link and size <= SIMULATED_RANKS
        self.costs = costs if table is None else table.costs.completed(costs)
        self._reproducible = BUILT_IN if table is None else table.costs  # the same in every launch
        self.call = CALL if table is None and size > 1 else 0.0  # costs fitted to calls include it
        self._most_segments = 1 if self.shares_link or (self.cores and nodes is None) else MOST_SEGMENTS
        self._decided: dict[CallTraits, Selection] = {}

    def decide(self, traits: CallTraits) -> Selection:
        """Fastest suitable algorithm for the size class of a call, by measured times if any apply, else by the model.

        The model decides calls on large shared buffers, unless ranks forward data. All but native algorithms give equal
        bits on all ranks.
        """
        nbytes = TYPICAL_BLOCK * self.size if traits.local_counts else size_class(traits.nbytes)
        if nbytes != traits.nbytes:  # calls of a size class share one choice
            traits = traits._replace(nbytes=nbytes)
        decided = self._decided.get(traits)
        if decided is None:
            adapt = None
            if traits.shared and nbytes >= RENDEZVOUS_BYTES and not forwards_data(traits.collective, self.size):
                adapt = partial(Costs.with_shared_buffers, in_place=traits.in_place)
            from_table = self._from_table(traits) if adapt is None else None
            decided = self._decided[traits] = from_table or self._from_model(traits, adapt)
        return decided

    def _deciding_costs(self, traits: CallTraits) -> Costs:
        """Costs that decide in the model: not those measured at creation where the choice could change the bits.

        These are the reductions of three ranks and more: a sum of two has the same bits in either order.
        """
        reorders = self.size > 2 and MEANINGS[traits.collective].reduces
        return self._reproducible if reorders else self.costs

    def _from_table(self, traits: CallTraits) -> Selection | None:
        """Fastest suitable algorithm in the best rows of the timing table that have one. None if none has."""
        if self.table is None:
            return None
        series = self.table.rows(traits.collective, traits.form, traits.v_form, self.size, self.nodes)
        for rows, exact in series:
            able = {
                choice: seconds
                for choice, seconds in interpolate(rows, traits.nbytes).items()
                if self._is_suitable(choice, traits, exact)
            }
            if able:
                best = min(able, key=able.__getitem__)
                return Selection(*best, able[best], "measured")
        return None

    def _is_suitable(self, choice: AlgorithmChoice, traits: CallTraits, exact: bool) -> bool:
        """True if a measured algorithm can do the call. The catalogue may have changed since the measurement.

        `exact`: measured for exactly this form of call. Others do not include the exchange of counts.
        """
        if choice.algorithm == NATIVE:
            return exact and traits.native and not traits.local_counts and traits.nbytes < NATIVE_BYTES
        entry = catalog.CATALOG[traits.collective].get(choice.algorithm)  # tables may be older
        if entry is None or (traits.local_counts and not exact and not entry.private):
            return False
        return choice.segments <= MOST_SEGMENTS and entry.alike and _fits(entry, traits.ordered, self.nodes)

    def _from_model(self, traits: CallTraits, adapt: Callable[[Costs], Costs] | None) -> Selection:
        """Fastest suitable algorithm and segment count by the cost model. With local counts, the one of least latency.

        `adapt`, if any, changes the costs for the buffers of the call. The expected time is at all measured costs.
        """
        deciding, measured = self._deciding_costs(traits), self.costs
        if adapt is not None:
            deciding, measured = adapt(deciding), adapt(measured)
        entries = catalog.CATALOG[traits.collective].items()
        able = {name: entry for name, entry in entries if entry.alike and _fits(entry, traits.ordered, self.nodes)}
        if traits.local_counts or self._mixed is None:
            able = {name: entry for name, entry in able.items() if not entry.placed}
        if traits.local_counts:  # without all lengths ranks cannot agree on a choice by size
            best = AlgorithmChoice(_least_latency(traits.collective, able, self.size, self._wire(deciding)))
        else:
            found: dict[AlgorithmChoice, float] = {}
            for name in able:
                segments, seconds = best_segments(partial(self._seconds, traits, name, deciding), self._most_segments)
                found[AlgorithmChoice(name, segments)] = seconds
            best = min(found, key=found.__getitem__)
        return Selection(*best, self._seconds(traits, best.algorithm, measured, best.segments) + self.call, "model")

    def _wire(self, costs: Costs) -> UniformNetwork:
        """Costs of every edge, or of the slower ones if they differ."""
        return uniform_network(self.nodes, costs) or costs.network

    def _seconds(self, traits: CallTraits, name: str, costs: Costs, segments: int) -> float:
        """Predicted seconds of an algorithm.

        The catalogue's formulas count where all edges cost the same. Elsewhere algorithms that use the topology are
        simulated, and all others are priced as if every message took the slower wire. Where ranks share cores, the work
        of all of them counts.
        """
        size = self.size if self._mixed is None else len(self._mixed)
        call = traits.collective, name, size, traits.nbytes
        if catalog.find(traits.collective, name).placed:
            return predict(*call, segments, nodes=self._mixed, costs=costs)
        if self.shares_link:  # one GPU carries all messages, so the busiest rank is not the limit
            return predict_on_shared_link(*call)
        wire = self._wire(costs)
        if self.cores is None:
            alike = self.nodes is not None and self._mixed is None
            return formula(*call, segments, wire) + (exchange_seconds(*call, wire) if alike else 0.0)
        if self.nodes is None:
            return predict_on_shared_cores(*call, self.cores)
        waited = without_core_time(wire)
        worked = core_time(*call, segments, waited) / self.cores
        return formula(*call, segments, waited) + worked + exchange_seconds(*call, wire)


def catalog_name(collective: str) -> str:
    """Name of a collective in the catalogue. The catalogue has no v-forms: ``scatter`` for ``scatterv``."""
    return _V_FORMS.get(collective, collective)


def has_local_counts(collective: str) -> bool:
    """True for scatterv, gatherv and alltoallv, where ranks know only their own block's length."""
    return collective in ("scatterv", "gatherv", "alltoallv")


def algorithms(collective: str) -> list[str]:
    """Names of the algorithms of a collective: the naive one first, the MPI's own collective last.

    Parameters
    ----------
    collective : str
        ``"allreduce"``, ``"broadcast"``, ``"scatterv"`` ... in lower case. Others raise ValueError with all names.

    Examples
    --------
    >>> algorithms("gatherv")
    ['linear', 'mst', 'direct', 'hierarchical', 'leaders', 'native']
    """
    return [*catalog.names(catalog_name(collective)), NATIVE]


def forwards_data(collective: str, size: int) -> bool:
    """True if ranks may forward blocks, or sums of blocks, that they do not keep: these need scratch memory.

    >>> forwards_data("reduce", 2), forwards_data("gather", 2), forwards_data("gather", 3)
    (True, False, True)
    """
    meaning, ranks = MEANINGS[collective], range(3)
    blocks = meaning.blocks(len(ranks))
    all_keep_all = all(len(meaning.after(rank, len(ranks), 0, blocks)) == blocks for rank in ranks)
    return not all_keep_all and (size > 2 or collective == "reduce")


def size_class(nbytes: int) -> int:
    """Number of bytes rounded down to one of four classes per octave. Calls of a class share one choice.

    >>> [size_class(nbytes) for nbytes in (0, 7, 1000, 1024, 1300)]
    [0, 7, 896, 1024, 1280]
    """
    shift = nbytes.bit_length() - 3
    return nbytes >> shift << shift if shift > 0 else nbytes


def check(collective: str, algorithm: str, ordered: bool = False, nodes: Nodes | None = None) -> None:
    """Raise InvalidArgument if an algorithm is not in the catalogue or, with `ordered`, does not keep rank order."""
    try:
        entry = catalog.find(collective, algorithm)
    except ValueError as error:
        raise InvalidArgument(MPI.ERR_ARG, f"algorithm: {error}, {NATIVE}") from None
    if not _fits(entry, ordered, nodes):
        able = [n for n, e in catalog.CATALOG[collective].items() if _fits(e, ordered, nodes)]
        why = "does not keep rank order, which an operation that does not commute needs"
        raise InvalidArgument(MPI.ERR_ARG, f"algorithm: {algorithm!r} for {collective} {why}; able: {', '.join(able)}")


def _fits(entry: catalog.Algorithm, ordered: bool, nodes: Nodes | None) -> bool:
    return not ordered or entry.keeps_order(nodes)


def _least_latency(collective: str, able: Mapping[str, catalog.Algorithm], size: int, wire: UniformNetwork) -> str:
    """Name of the algorithm of least latency among those that send least. Latency counts twice unless `private`."""
    volumes = {name: catalog.evaluate(entry.volume, size) for name, entry in able.items()}
    latencies = {
        name: formula(collective, name, size, 0, 1, wire) * (1 if entry.private else 2)
        for name, entry in able.items()
        if volumes[name] == min(volumes.values())
    }
    return min(latencies, key=latencies.__getitem__)


def sample(nodes: Nodes, most: int) -> Nodes:
    """Placement of at most `most` ranks of a cluster: its first nodes, at least two, each cut to `most` / 2 ranks."""
    if len(nodes) <= most:
        return nodes
    per_node = min(max(map(nodes.count, set(nodes))), most // 2)
    ranks, room = [], dict.fromkeys(range(max(2, most // per_node)), per_node)
    for node in nodes:
        if room.get(node, 0):
            room[node] -= 1
            ranks.append(node)
    return tuple(ranks)


def best_segments(seconds: Callable[[int], float], most: int = MOST_SEGMENTS) -> tuple[int, float]:
    """Best number of segments (1, 2, 4 ... while `seconds(segments)` falls), and its seconds."""
    segments, best = 1, seconds(1)
    while 2 * segments <= most and (faster := seconds(2 * segments)) < best:
        segments, best = 2 * segments, faster
    return segments, best


def formula(collective: str, name: str, size: int, nbytes: int, segments: int, wire: UniformNetwork) -> float:
    """Predicted seconds by the catalogue's formulas, for an algorithm that does not use the topology.

    `nbytes`: bytes of the whole vector, or of all blocks that one rank holds. `wire` is the cost of every edge. Of the
    messages that a rank has under way at once, all but one cost the overhead only. Formulas of an algorithm that cuts
    the data itself count segments. In all others segments follow one another through the busiest rank: each after the
    first costs its messages once more, and only the first waits for the whole path.
    """
    if size == 1:
        return 0.0
    entry = catalog.find(collective, name)
    moving, combining = entry.beta or entry.volume, entry.gamma or entry.combined
    formulas = entry.rounds, moving, combining, entry.volume, entry.combined, entry.depth or entry.rounds
    values = catalog.evaluate_all(formulas, size, segments if entry.cuts else 1)
    waited, moved, added, volume, combined, depth = values
    overhead = wire.alpha if wire.overhead is None else min(wire.alpha, wire.overhead)
    at_once = waited - depth  # messages under way together pay the overhead, not alpha
    if not entry.cuts:
        waited += (segments - 1) * (waited * volume / moved if moved else waited)
        moved = volume + (moved - volume) / segments
        added = combined + (added - combined) / segments
    return waited * wire.alpha - at_once * (wire.alpha - overhead) + nbytes * (moved * wire.beta + added * wire.gamma)


@lru_cache(maxsize=4096)
def predict(
    collective: str,
    algorithm: str,
    size: int,
    nbytes: int,
    segments: int | None = None,
    nodes: Nodes | None = None,
    costs: Costs = BUILT_IN,
) -> float:
    """Predicted seconds from the common start until the last rank is done, by simulating the schedule with root 0.

    Parameters
    ----------
    collective, algorithm : str
        Names from `algorithms`. ``"native"`` raises ValueError.
    size, nbytes, segments : int
        Ranks. Bytes of the whole vector, or of all blocks that one rank holds. Number of segments.
    nodes : tuple of int, optional
        Node of each rank. None if all ranks are on one.
    costs : Costs
    """
    collective, segments = catalog_name(collective), segments or 1
    blocks = catalog.blocks(collective, algorithm, size)
    held_by_all = nbytes * blocks // vector(collective, size, blocks)
    layout = ChunkLayout.packed(even(held_by_all, blocks * segments))
    schedules = catalog.build_all(collective, algorithm, size, 0, segments, nodes)
    return price(schedules, layout, 1, network(nodes, costs)).seconds
