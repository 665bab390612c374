"""What messages and additions cost on the wires of a machine: shared memory within a node, the network between."""

from __future__ import annotations

from typing import NamedTuple

from collectives.placement import Nodes
from collectives.walk import Network, Uniform


class Costs(NamedTuple):
    """Alpha, beta and gamma of both wires, in seconds a message, a byte, a combined byte.

    Attributes
    ----------
    shared : Uniform
        Between ranks of one node.
    network : Uniform
        Between nodes.
    """

    shared: Uniform = Uniform(alpha=1.5e-6, beta=1 / 9e9, gamma=1 / 20e9)
    network: Uniform = Uniform(alpha=1e-5, beta=1 / 3e9, gamma=1 / 20e9)


BUILT_IN = Costs()
"""Where nothing was measured: one node of a few years ago, and 25 Gbit/s between such."""


class Placed(NamedTuple):
    """The network of ranks on several nodes: each edge costs what its wire does."""

    nodes: Nodes
    costs: Costs

    @property
    def gamma(self) -> float:
        """Seconds to combine a byte."""
        return self.costs.shared.gamma

    def edge(self, source: int, target: int) -> tuple[float, float]:
        """(alpha, beta) of the wire that the two ranks share."""
        together = self.nodes[source] == self.nodes[target]
        return (self.costs.shared if together else self.costs.network).edge(source, target)


def alike(nodes: Nodes | None, costs: Costs) -> Uniform | None:
    """The wire of all edges, if they are alike: all ranks on one node, or each on its own."""
    if nodes is None:
        return costs.shared
    return costs.network if len(set(nodes)) == len(nodes) else None


def network(nodes: Nodes | None, costs: Costs) -> Network:
    """What every edge costs under a placement."""
    return alike(nodes, costs) or Placed(nodes or (), costs)
