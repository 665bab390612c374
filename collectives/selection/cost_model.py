"""Cost model of a machine: alpha, beta and gamma of shared memory within nodes and of the network between them."""

from __future__ import annotations

from math import inf, log2
from typing import NamedTuple

from collectives.analysis.cost_functions import ClusteredNetwork, CostFunctions, LinearCost, UniformNetwork
from collectives.schedule.topology import Nodes
from collectives.transport.memory.copy_speed import MessageSpeed
from collectives.transport.mpi.network_speed import NetworkSpeed

CALL = 0.7e-6
"""Seconds of a compiled call without its messages, from when the first rank starts until the last one ends."""

MESSAGE = 0.6e-6
"""Seconds of a compiled message, beside the round trip of a flag."""

NETWORK_OVERHEAD = 0.25
"""Overhead of a message between nodes, as a share of alpha."""


class Costs(NamedTuple):
    """Costs in seconds per message, byte and reduced byte, within a node (`shared`) and between nodes (`network`).

    Reductions within a node are cheap on purpose: a result that a rank has just computed is slower to read for other
    ranks than the data of the call. The model does not represent this. So sharing the computation gains less than its
    cost suggests.
    """

    shared: UniformNetwork = UniformNetwork(alpha=1.5e-6, beta=1 / 8.8e9, gamma=1 / 240e9, overhead=MESSAGE)
    network: UniformNetwork = UniformNetwork(2e-5, beta=1 / 1.25e9, gamma=1 / 20e9, overhead=2e-5 * NETWORK_OVERHEAD)

    def completed(self, others: Costs) -> Costs:
        """These costs, completed with `others` for interfaces that were not measured (built-in values)."""
        wires = zip(self, BUILT_IN, others, strict=True)
        return Costs(*(other if wire == built_in else wire for wire, built_in, other in wires))

    def with_shared_buffers(self, in_place: bool) -> Costs:
        """Costs adjusted for a call whose buffers are in shared memory and, if `in_place`, used in place.

        Mailboxes carry addresses only, so a byte is copied once, not twice. But a reduction then reads from another
        core's cache, and in place, where the same elements are sent and reduced, it must receive into scratch first.
        """
        alpha, beta, gamma, _ = self.shared
        shared = self.shared._replace(alpha=alpha / 2, beta=beta / 2, gamma=(10 if in_place else 5) * gamma)
        return self._replace(shared=shared)


BUILT_IN = Costs()
"""Costs without measurements: one node of a few years ago, and 10 Gbit/s between nodes."""


def measured_costs(speed: MessageSpeed, between: NetworkSpeed) -> Costs:
    """Costs of messages that were measured, within nodes and `between` them, otherwise the built-in ones.

    Rounded to powers of the square root of 2, so that most launches on one machine have the same.
    """
    costs, byte = BUILT_IN, min(speed.write + speed.read, speed.by_address)
    if 0 < byte < inf and 0 < speed.round_trip < inf:
        alpha = _rounded(MESSAGE + speed.round_trip)
        costs = costs._replace(shared=costs.shared._replace(alpha=alpha, beta=_rounded(byte)))
    if between.message > 0 and between.byte > 0:
        alpha, ratio = _rounded(between.message), NETWORK_OVERHEAD
        network = costs.network._replace(alpha=alpha, beta=_rounded(between.byte), overhead=alpha * ratio)
        costs = costs._replace(network=network)
    return costs


def _rounded(seconds: float) -> float:
    return float(2 ** (round(2 * log2(seconds)) / 2))


def uniform_network(nodes: Nodes | None, costs: Costs) -> UniformNetwork | None:
    """Cost of every edge if they are equal (all ranks on one node, or one rank per node), else None."""
    if nodes is None:
        return costs.shared
    return costs.network if len(set(nodes)) == len(nodes) else None


def network(nodes: Nodes | None, costs: Costs) -> CostFunctions:
    """Cost functions of messages and reductions under a placement, without contention for network cards."""
    uniform = uniform_network(nodes, costs)
    if uniform is not None:
        return uniform
    shared, between = (LinearCost(wire.alpha, wire.beta) for wire in costs)
    return ClusteredNetwork(nodes or (), shared, between, LinearCost(0.0, costs.shared.gamma), shared=False)
