"""Cost model of a machine: alpha, beta and gamma of shared memory within nodes and of the network between."""

from __future__ import annotations

from typing import NamedTuple

from collectives.analysis.cost_functions import ClusteredNetwork, CostFunctions, LinearCost, UniformNetwork
from collectives.schedule.topology import Nodes


class Costs(NamedTuple):
    """Alpha, beta and gamma of both wires, in seconds a message, a byte, a combined byte.

    Attributes
    ----------
    shared : Uniform
        Between ranks of one node.
    network : Uniform
        Between nodes.
    """

    shared: UniformNetwork = UniformNetwork(alpha=6e-6, beta=1 / 8.8e9, gamma=1 / 25e9)
    network: UniformNetwork = UniformNetwork(alpha=2e-5, beta=1 / 3e9, gamma=1 / 20e9)

    def seen(self, in_place: bool) -> Costs:
        """The same where neighbours see each other's arrays: nothing is put into mailboxes but addresses, so a byte is
        copied once, not twice; but what is combined comes out of another core's cache, and in place it is twice that
        much where everything is both sent and combined: it must land somewhere before.
        """
        alpha, beta, gamma = self.shared
        return self._replace(shared=UniformNetwork(alpha / 2, beta / 2, (4 if in_place else 2) * gamma))


BUILT_IN = Costs()
"""Where nothing was measured: one node of a few years ago, and 25 Gbit/s between such."""


def alike(nodes: Nodes | None, costs: Costs) -> UniformNetwork | None:
    """The wire of all edges, if they are alike: all ranks on one node, or each on its own."""
    if nodes is None:
        return costs.shared
    return costs.network if len(set(nodes)) == len(nodes) else None


def network(nodes: Nodes | None, costs: Costs) -> CostFunctions:
    """Cost functions of every edge under a placement, without contention for network cards, as in the formulas."""
    everywhere = alike(nodes, costs)
    if everywhere is not None:
        return everywhere
    shared, between = (LinearCost(wire.alpha, wire.beta) for wire in costs)
    return ClusteredNetwork(nodes or (), shared, between, LinearCost(0.0, costs.shared.gamma), shared=False)
