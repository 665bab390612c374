"""Selection of algorithm and segments of a call: measured times, else the cost model; equal on all ranks.

A choice is made from what all ranks know alike: collective, form, ranks, placement, bytes, the operation's order, and
a table that all of them got from one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from mpi4py import MPI

from collectives.algorithms import catalog
from collectives.analysis.cost_functions import UniformNetwork
from collectives.analysis.prove import price
from collectives.errors import InvalidArgument
from collectives.schedule.chunks import ChunkLayout, even
from collectives.schedule.semantics import MEANINGS, vector
from collectives.schedule.topology import Nodes
from collectives.selection.cost_model import BUILT_IN, Costs, alike, network
from collectives.selection.timing_table import BLOCKING, NATIVE, AlgorithmChoice, TimingTable, interpolate
from collectives.transport.compiled_exchange import SEEN

MOST_SEGMENTS = 64
"""Each segment has messages of its own, which must be bound."""

TYPICAL = 1024
"""Bytes of a block, where ranks do not know how long the blocks of others are."""

WALKED = 64
"""Ranks that are played to price an algorithm that looks at the placement; larger clusters by a part of them."""

NATIVE_BYTES = 1 << 31
"""Bytes from which counts are too large for some MPIs."""


class Selection(NamedTuple):
    """Choice of ``algorithm="auto"``, with the reason.

    Attributes
    ----------
    algorithm : str
    segments : int
    seconds : float
        What the call should take.
    source : str
        ``"measured"``, between the sizes of a tuned table, or ``"model"``.
    """

    algorithm: str
    segments: int
    seconds: float
    source: str


class CallTraits(NamedTuple):
    """Properties of a call that decide its algorithm, equal on all ranks.

    Attributes
    ----------
    collective : str
        Name in the catalogue.
    nbytes : int
        Bytes of the whole vector, or of all blocks together. Ignored with `local_counts`.
    ordered : bool
        The operation needs rank order.
    local_counts : bool
        Ranks know only their own block's length.
    native : bool
        The MPI's own collective may be taken, if it was measured to be the fastest.
    form : str
        "blocking", "nonblocking" or "persistent".
    v_form : bool
        Blocks may have any length.
    shared : bool
        All buffers of all ranks are in shared memory. The model then decides, as tables measure ordinary memory.
    in_place : bool
        The shared buffers are used in place on all ranks.
    """

    collective: str
    nbytes: int
    ordered: bool = False
    local_counts: bool = False
    native: bool = False
    form: str = BLOCKING
    v_form: bool = False
    shared: bool = False
    in_place: bool = False


class Selector:
    """Selector of ``algorithm="auto"`` for one communicator, with a cache of choices.

    Parameters
    ----------
    size : int
        Ranks.
    nodes : tuple of int, optional
        Which ranks share a node; None if all do.
    table : Table, optional
        What was measured, the same on all ranks. Without one the model decides, at built-in costs.
    """

    def __init__(self, size: int, nodes: Nodes | None = None, table: TimingTable | None = None) -> None:
        self.size, self.nodes, self.table = size, nodes, table
        self.costs = BUILT_IN if table is None else table.costs
        self._chosen: dict[CallTraits, AlgorithmChoice] = {}

    def choose(self, traits: CallTraits) -> AlgorithmChoice:
        """Algorithm of `decide` for the size class of the call, from a cache."""
        nbytes = graded(traits.nbytes)
        if nbytes != traits.nbytes:
            traits = traits._replace(nbytes=nbytes)
        choice = self._chosen.get(traits)
        if choice is None:
            choice = self._chosen[traits] = AlgorithmChoice(*self.decide(traits)[:2])
        return choice

    def decide(self, traits: CallTraits) -> Selection:
        """Fastest algorithm that can do the call and gives all ranks the same bits."""
        collective, nbytes, ordered, private = traits.collective, traits.nbytes, traits.ordered, traits.local_counts
        if traits.shared and not private and nbytes >= SEEN and not relays(collective, self.size):
            costs = self.costs.seen(traits.in_place)
            choice, seconds = _cheapest(collective, self.size, nbytes, ordered, private, self.nodes, costs)
            return Selection(*choice, seconds, "model")
        if private:
            nbytes = TYPICAL * self.size
        native = traits.native and not private and nbytes < NATIVE_BYTES
        if self.table is not None:
            for rows, trusted in self.table.rows(collective, traits.form, traits.v_form, self.size, self.nodes):
                measured = interpolate(rows, nbytes)
                able = {
                    choice: seconds
                    for choice, seconds in measured.items()
                    if self._may(collective, choice, ordered, private and not trusted, native and trusted)
                }
                if able:
                    best = min(able, key=able.__getitem__)
                    return Selection(*best, able[best], "measured")
        choice, seconds = _cheapest(collective, self.size, nbytes, ordered, private, self.nodes, self.costs)
        return Selection(*choice, seconds, "model")

    def _may(self, collective: str, choice: AlgorithmChoice, ordered: bool, private: bool, native: bool) -> bool:
        """True if a measured algorithm is suitable; the catalogue may have changed since the measurement."""
        if choice.algorithm == NATIVE:
            return native
        entry = catalog.CATALOG[collective].get(choice.algorithm)
        if entry is None or (private and not entry.private):  # lengths that travel ahead were not measured
            return False
        return entry.alike and _fits(entry, ordered, self.nodes)


def relays(collective: str, size: int) -> bool:
    """True if ranks may forward blocks, or sums of blocks, that they do not keep: these need scratch memory.

    >>> relays("reduce", 2), relays("gather", 2), relays("gather", 3), relays("allreduce", 3)
    (True, False, True, False)
    """
    meaning, few = MEANINGS[collective], range(3)
    blocks = meaning.blocks(len(few))
    all_take_all = all(len(meaning.after(rank, len(few), 0, blocks)) == blocks for rank in few)
    return not all_take_all and (size > 2 or collective == "reduce")


def graded(nbytes: int) -> int:
    """The size that stands for its neighbours, four to an octave: one choice for all of them is enough.

    >>> [graded(nbytes) for nbytes in (0, 7, 1000, 1024, 1300)]
    [0, 7, 896, 1024, 1280]
    """
    grain = nbytes.bit_length() - 3
    return nbytes >> grain << grain if grain > 0 else nbytes


def choose(
    collective: str,
    size: int,
    nbytes: int,
    ordered: bool = False,
    private: bool = False,
    nodes: Nodes | None = None,
    costs: Costs = BUILT_IN,
) -> AlgorithmChoice:
    """Choice of the cost model: the cheapest suitable algorithm that gives all ranks the same bits."""
    if private:
        nbytes = TYPICAL * size
    return _cheapest(collective, size, nbytes, ordered, private, nodes, costs)[0]


def check(collective: str, algorithm: str, ordered: bool = False, nodes: Nodes | None = None) -> None:
    """Refuse an algorithm that the user named and that is unknown or cannot do the call."""
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


# ------------------------------------------------------------------------------------------ the model


def _cheapest(
    collective: str, size: int, nbytes: int, ordered: bool, private: bool, nodes: Nodes | None, costs: Costs
) -> tuple[AlgorithmChoice, float]:
    """By the catalogue's formulas where all edges are alike; else those that look at the placement are walked.

    All others are then taken to send over the slower wire all the time.
    """
    wire = alike(nodes, costs)
    entries = catalog.CATALOG[collective].items()
    able = {name: entry for name, entry in entries if entry.alike and _fits(entry, ordered, nodes)}
    if private:
        name = _blindly({name: entry for name, entry in able.items() if not entry.placed}, size)
        return AlgorithmChoice(name), formula(collective, name, size, nbytes, 1, wire or costs.network)
    part = nodes if nodes is None or wire is not None else sample(nodes, WALKED)
    ranks = size if part is None else len(part)
    found: dict[AlgorithmChoice, float] = {}
    for name, entry in able.items():
        told = collective, name, ranks, nbytes
        if not entry.placed:
            segments, seconds = _in_segments(partial(formula, *told, wire=wire or costs.network))
        elif wire is None:
            segments, seconds = _in_segments(partial(predict, *told, nodes=part, costs=costs))
        else:
            continue
        found[AlgorithmChoice(name, segments)] = seconds
    best = min(found, key=found.__getitem__)
    return best, found[best]


def _blindly(able: dict[str, catalog.Algorithm], size: int) -> str:
    """The fewest rounds of those that move the least, as the bytes are not known; lengths sent ahead take as many."""
    least = min(catalog.evaluate(entry.volume, size) for entry in able.values())
    frugal = {n: e for n, e in able.items() if catalog.evaluate(e.volume, size) == least}
    return min(frugal, key=lambda n: catalog.evaluate(frugal[n].rounds, size) * (1 if frugal[n].private else 2))


def sample(nodes: Nodes, most: int) -> Nodes:
    """A part of a cluster with at most so many ranks: whole nodes if they are not too large, and at least two."""
    if len(nodes) <= most:
        return nodes
    per_node = min(max(map(nodes.count, set(nodes))), most // 2)
    kept, room = [], dict.fromkeys(range(max(2, most // per_node)), per_node)
    for node in nodes:
        if room.get(node, 0):
            room[node] -= 1
            kept.append(node)
    return tuple(kept)


def _in_segments(seconds: Callable[[int], float], most: int = MOST_SEGMENTS) -> tuple[int, float]:
    """In how many segments it is fastest, and how fast: doubled for as long as that helps."""
    segments, best = 1, seconds(1)
    while 2 * segments <= most:
        faster = seconds(2 * segments)
        if faster >= best:
            break
        segments, best = 2 * segments, faster
    return segments, best


class _Factors(NamedTuple):
    """An algorithm's formulas as numbers: factors of alpha, n beta and n gamma, and what the busiest rank does."""

    rounds: float
    beta: float
    gamma: float
    volume: float
    combined: float


@lru_cache(maxsize=4096)
def _factors(entry: catalog.Algorithm, size: int, segments: int) -> _Factors:
    of = (entry.rounds, entry.beta or entry.volume, entry.gamma or entry.combined, entry.volume, entry.combined)
    return _Factors(*(float(catalog.evaluate(each, size, segments)) for each in of))


def formula(collective: str, name: str, size: int, nbytes: int, segments: int, wire: UniformNetwork) -> float:
    """Seconds by the catalogue's formulas, where all edges are alike.

    Those of an algorithm that cuts the data itself count segments. In all others segments follow one another through
    the busiest rank: each after the first costs its messages once more, and only the first has to wait its whole way.

    Parameters
    ----------
    collective, name : str
        Names in the catalogue, of an algorithm that does not look at the placement.
    size, nbytes, segments : int
        Ranks; bytes of the whole vector, or of all blocks together; into how many segments they are cut.
    wire : Uniform
        The costs of every edge.
    """
    entry = catalog.find(collective, name)
    if size == 1:
        return 0.0
    if entry.cuts:
        waited, moved, added, *_ = _factors(entry, size, segments)
    else:
        f = _factors(entry, size, 1)
        messages = f.rounds * f.volume / f.beta if f.beta else f.rounds
        waited = f.rounds + (segments - 1) * messages
        moved = f.volume + (f.beta - f.volume) / segments
        added = f.combined + (f.gamma - f.combined) / segments
    return waited * wire.alpha + nbytes * (moved * wire.beta + added * wire.gamma)


@lru_cache(maxsize=4096)
def predict(
    collective: str,
    algorithm: str,
    size: int,
    nbytes: int,
    segments: int = 1,
    nodes: Nodes | None = None,
    costs: Costs = BUILT_IN,
) -> float:
    """Seconds that the model expects, by playing the schedule on the clock.

    Parameters
    ----------
    collective, algorithm : str
        Names in the catalogue.
    size, nbytes : int
        Ranks; bytes of the whole vector, or of all blocks together.
    segments : int
        Into how many segments the data is cut.
    nodes : tuple of int, optional
        Which ranks share a node; None if all do.
    costs : Costs
        Of the wires.

    Returns
    -------
    float
        Seconds from the common start until the last rank is done, for root 0.
    """
    blocks = catalog.blocks(collective, algorithm, size)
    held_by_all = nbytes * blocks // vector(collective, size, blocks)
    layout = ChunkLayout.packed(even(held_by_all, blocks * segments))
    schedules = catalog.build_all(collective, algorithm, size, 0, segments, nodes)
    return price(schedules, layout, 1, network(nodes, costs)).seconds
