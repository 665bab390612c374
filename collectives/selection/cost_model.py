"""What messages and additions cost on the wires of a machine: shared memory within a node, the network between."""

from __future__ import annotations

from typing import NamedTuple

from collectives.analysis.cost_functions import Clustered, Line, Network, Uniform
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

    shared: Uniform = Uniform(alpha=6e-6, beta=1 / 8.8e9, gamma=1 / 25e9)
    network: Uniform = Uniform(alpha=2e-5, beta=1 / 3e9, gamma=1 / 20e9)

    def seen(self, in_place: bool) -> Costs:
        """The same where neighbours see each other's arrays: nothing is put into mailboxes but addresses, so a byte is
        copied once, not twice; but what is combined comes out of another core's cache, and in place it is twice that
        much where everything is both sent and combined: it must land somewhere before.
        """
        alpha, beta, gamma = self.shared
        return self._replace(shared=Uniform(alpha / 2, beta / 2, (4 if in_place else 2) * gamma))


BUILT_IN = Costs()
"""Where nothing was measured: one node of a few years ago, and 25 Gbit/s between such."""


def alike(nodes: Nodes | None, costs: Costs) -> Uniform | None:
    """The wire of all edges, if they are alike: all ranks on one node, or each on its own."""
    if nodes is None:
        return costs.shared
    return costs.network if len(set(nodes)) == len(nodes) else None


def network(nodes: Nodes | None, costs: Costs) -> Network:
    """What every edge costs under a placement. Nobody shares a card: the formulas compared with it know none."""
    everywhere = alike(nodes, costs)
    if everywhere is not None:
        return everywhere
    shared, between = (Line(wire.alpha, wire.beta) for wire in costs)
    return Clustered(nodes or (), shared, between, Line(0.0, costs.shared.gamma), shared=False)
