"""Seconds of messages and collectives among any ranks, by the selection and the cost model of `collectives`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from collectives.analysis.cost_functions import LinearCost
from collectives.selection.cost_model import Costs
from collectives.selection.select import CallTraits, Selector, catalog_name, has_local_counts
from parallel.planning.measured.recording_comm import MESSAGE


@dataclass(frozen=True)
class MessageCosts:
    """Messages priced by `costs`, with the node of every rank, and the cores of a node."""

    costs: Costs
    nodes: tuple[int, ...]
    cores: int

    def over_network(self, ranks: Sequence[int]) -> bool:
        """True if these ranks are on several nodes."""
        return len({self.nodes[rank] for rank in ranks}) > 1

    def collective(
        self, name: str, ranks: Sequence[int], nbytes: int, shared: bool = False, idle: float = math.inf
    ) -> float:
        """Seconds of a collective among these ranks. `nbytes`: of a vector, or of all blocks together.

        `shared`: they are in shared memory. `idle`: seconds since these ranks' last collective (the cost model ignores
        it).
        """
        if len(ranks) < 2 or not nbytes:
            return 0.0
        base, nodes = catalog_name(name), [self.nodes[rank] for rank in ranks]
        selector = _selector(self._with_shared_cards(), tuple(map(sorted(set(nodes)).index, nodes)), self.cores)
        traits = CallTraits(base, nbytes, v_form=base != name, local_counts=has_local_counts(name), shared=shared)
        return selector.decide(traits).seconds

    def among(self, name: str, ranks: Sequence[int], nbytes: int) -> float:
        """Seconds of an exchange as `RecordingComm` records it: a collective, or a message between neighbours."""
        return self.message(ranks[0], ranks[1], nbytes) if name == MESSAGE else self.collective(name, ranks, nbytes)

    def hidden(self, ranks: Sequence[int], name: str) -> float:
        """Share of a collective among these ranks that goes on beside their computation."""
        return float(self.over_network(ranks) and len(self.nodes) < self.cores)

    def _with_shared_cards(self) -> Costs:
        """Costs where all ranks of a node communicate at once, as they do in a training, over one network card."""
        wire, together = self.costs.network, max(map(self.nodes.count, self.nodes))
        return self.costs._replace(network=wire._replace(beta=wire.beta * together))

    def message(self, source: int, target: int, nbytes: float) -> float:
        """Seconds of a message between two ranks."""
        wire = self.costs.network if self.over_network((source, target)) else self.costs.shared
        return float(LinearCost(wire.alpha, wire.beta)(nbytes))


@lru_cache(maxsize=64)
def _selector(costs: Costs, nodes: tuple[int, ...], cores: int) -> Selector:
    crowded = len(set(nodes)) == 1 and len(nodes) > cores
    several = nodes if len(set(nodes)) > 1 else None
    return Selector(len(nodes), several, cores=cores if crowded else None, costs=costs)
