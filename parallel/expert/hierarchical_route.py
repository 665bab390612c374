"""Hierarchical route of tokens: a token travels once to each node that has experts of it, then within the node.

Every rank has a *relay* on each other node, the rank at the same place there. Token t of rank 0, with two experts on
the node of ranks 2 and 3, one on either::

    direct         0 -> 2, 0 -> 3             results: 2 -> 0, 3 -> 0
    hierarchical   0 -> 2, then 2 -> 3        results: 3 -> 2, their weighted sum 2 -> 0

So at most min(k, nodes) copies of a token cross the network, and as many sums of results (DeepSeek-V3,
arXiv:2412.19437, section 3.2.2). Within its node a relay uses a direct route, as if the tokens were its own.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallel.expert.direct_route import DirectRoute
from parallel.expert.row_codec import RowCodec
from parallel.expert.row_exchange import RowExchange, RowPart, RowsByRank, segments
from parallel.nn import kernels
from parallel.nn.expert_group import Assignments
from parallel.runtime.vector_memory import to_host
from quant.types import Array


def relays(nodes: Sequence[int]) -> np.ndarray:
    """Relay of every rank on every node, of shape (ranks, nodes); on its own node the rank itself.

    >>> relays([0, 0, 0, 0, 1, 1]).tolist()
    [[0, 4], [1, 4], [2, 5], [3, 5], [0, 4], [2, 5]]
    """
    members = [np.flatnonzero(np.equal(nodes, node)) for node in range(max(nodes) + 1)]
    places = [(int(np.searchsorted(members[node], rank)), len(members[node])) for rank, node in enumerate(nodes)]
    return np.array([[each[place * len(each) // width] for each in members] for place, width in places])


class TokensByNode(NamedTuple):
    """Tokens of a rank by the node of their experts, each once: those of a node lie together, in the order of relays.

    Attributes
    ----------
    tokens : array of int64
        Row of each copy of a token.
    counts : array of int64, of shape (nodes,)
        Copies for each node.
    order : array of int64
        Assignments by node, and by expert within a node.
    copies : array of int64
        Copy of the token, among those for its node, of each of these assignments.
    assigned : array of int64, of shape (nodes,)
        Assignments for each node.
    numbers : array of int64, of shape (nodes + experts,)
        Copies for each node, and assignments to each expert.
    """

    tokens: np.ndarray
    counts: np.ndarray
    order: np.ndarray
    copies: np.ndarray
    assigned: np.ndarray

    numbers: np.ndarray

    @classmethod
    def of(cls, chosen: Assignments, nodes: np.ndarray, relay: np.ndarray) -> TokensByNode:
        """Plan for assignments, with the node of every expert and the relay on every node."""
        tokens = to_host(chosen.tokens)
        where = nodes[chosen.experts]
        by_node = [np.flatnonzero(where == node) for node in range(len(relay))]
        unique = [np.unique(tokens[one]) for one in by_node]
        copies = [np.searchsorted(some, tokens[one]) for some, one in zip(unique, by_node)]
        ascending = np.argsort(relay)
        return cls(
            np.concatenate([unique[node] for node in ascending]),
            np.array([len(some) for some in unique]),
            np.concatenate([by_node[node] for node in ascending]),
            np.concatenate([copies[node] for node in ascending]),
            np.array([len(some) for some in by_node]),
            np.array([*map(len, unique), *chosen.counts]),
        )


class HierarchicalRoute:
    """Route as `DirectRoute`, over relays. Sums of results are rounded to their dtype before they cross the network.

    Methods that wait for one exchange and start another are generators that yield after each start, so that several
    routes, of different tokens, can alternate; they return as those of `DirectRoute`.

    Parameters
    ----------
    axis, owners, chosen
        As of `DirectRoute`.
    plan : TokensByNode
        Of the same assignments.
    every : array of int64, of shape (ranks, nodes + experts)
        `TokensByNode.numbers` of every rank.
    codec : RowCodec, optional
        Encodes rows on their way between nodes.
    nodes : sequence of int
        Node of every rank of the axis, numbered from 0.
    local : MeshAxis, optional
        Ranks of the axis on this rank's node, in the same order: their exchange then has no messages to other nodes,
        as one along the whole axis has, of no rows.
    """

    def __init__(
        self,
        axis: Any,
        owners: Sequence[int],
        chosen: Assignments,
        plan: TokensByNode,
        every: np.ndarray,
        codec: RowCodec | None,
        nodes: Sequence[int],
        local: Any = None,
    ):
        self._axis, self._codec, self._chosen, self._plan = axis, codec, chosen, plan
        self._relays = relays(nodes)
        home, of_expert = nodes[axis.rank], np.repeat(nodes, owners)
        self._xp = kernels.array_namespace(chosen.weights)
        copies, counts = np.split(every, [self._relays.shape[1]], axis=1)
        sources = np.flatnonzero(self._relays[:, home] == axis.rank)  # ranks whose relay on this node is this rank
        self._copies = self._by_rank(self._plan.counts), self._from(sources, copies[:, home])
        here = of_expert == home
        self._assigned = self._by_rank(self._plan.assigned), self._from(sources, counts[:, here].sum(axis=1))
        experts = np.concatenate([np.repeat(np.flatnonzero(here), counts[rank, here]) for rank in sources])
        self._sorted = np.argsort(experts, kind="stable")  # assignments that arrive, by expert
        self._starts = np.repeat(np.cumsum(self._copies[1]) - self._copies[1], self._assigned[1])
        at_relays = np.zeros_like(counts)
        np.add.at(at_relays, (self._relays[:, home][:, None], np.flatnonzero(here)), counts[:, here])
        self._local, self._owners, self._at_relays = axis, owners, at_relays
        if local is not None:
            ranks = [rank for rank, node in enumerate(nodes) if node == home]
            self._local, self._owners = local, [owners[rank] for rank in ranks]
            self._at_relays = at_relays[np.ix_(ranks, here)]

    def _by_rank(self, by_node: np.ndarray) -> list[int]:
        """Numbers for every rank, from those for this rank's relays."""
        found = np.zeros(self._axis.size, np.int64)
        found[self._relays[self._axis.rank]] = by_node
        return list(found.tolist())

    def _from(self, sources: np.ndarray, numbers: np.ndarray) -> list[int]:
        found = np.zeros(self._axis.size, np.int64)
        found[sources] = numbers[sources]
        return list(found.tolist())

    @property
    def sends(self) -> list[int]:
        """Rows that this rank sends to each relay, itself included."""
        return self._copies[0]

    @property
    def received(self) -> np.ndarray:
        """Rows from each rank for each expert of this rank: numbers from relays. Only after `receive`."""
        return self._inner.received

    def _to_relays(self, rows: Array, *assigned: Array) -> None:
        """Start to send rows (tokens, width), once to each node, and arrays of the assignments, ordered by node."""
        (sends, receives), rank = self._copies, self._axis.rank
        copies = RowsByRank.taken(rows, self._xp.asarray(self._plan.tokens), sends, rank)
        others = [RowsByRank.divided(one, self._assigned[0], rank) for one in assigned]
        parts = [RowPart(copies, receives, self._codec), *(RowPart(one, self._assigned[1]) for one in others)]
        self._exchange = RowExchange(self._axis, parts, whole=True)

    def send(self, tokens: Array) -> None:
        """Start to send tokens (tokens, width) to their relays, with their assignments there."""
        copies = self._xp.asarray(self._plan.copies.astype(np.int32))
        self._to_relays(tokens, copies, self._chosen.weights[self._xp.asarray(self._plan.order)])

    def receive(self) -> Generator[None, None, RowsByRank]:
        """Rows that were sent to this rank's experts, by `send` or `send_gradients`: of a relay, by expert."""
        rows, *assigned = (part.joined() for part in self._exchange.finish())
        if assigned:
            copies, weights = assigned
            order = self._xp.asarray(self._sorted)
            tokens = (self._xp.asarray(self._starts) + copies)[order]
            self._number = len(rows)
            relayed = Assignments(tokens, self._at_relays[self._local.rank].tolist(), weights[order])
            self._inner = DirectRoute(self._local, self._owners, relayed, counts=self._at_relays)
            self._inner.send(rows)
        else:
            self._inner.send_gradients(kernels.widen(rows), self._results, rows.dtype)
        yield
        return self._inner.receive()

    def combine(self, results: RowsByRank, y: Array) -> Generator[None, None, list[Array]]:
        """Send results to the relays, and their weighted sums to the sources; add these to y, in the order of relays.

        Returns the results of the assignments that this rank relayed.
        """
        self._inner.to_sources(results)
        yield
        sums = self._xp.zeros((self._number, y.shape[1]), y.dtype)
        mine = self._inner.add_results(sums)
        self._to_sources(kernels.narrow(sums, results.own.dtype))
        yield
        self._add(self._exchange.finish()[0], y)
        return mine

    def _to_sources(self, rows: Array, *others: Array) -> None:
        (sends, receives), rank = self._copies, self._axis.rank
        parts = [RowPart(RowsByRank.divided(rows, receives, rank), sends, self._codec)]
        parts += [RowPart(RowsByRank.divided(one, self._assigned[1], rank), self._assigned[0]) for one in others]
        self._exchange = RowExchange(self._axis, parts)

    def _add(self, rows: RowsByRank, y: Array) -> None:
        """Add sums of relays to the rows of their tokens."""
        for tokens, part in zip(segments(self._xp.asarray(self._plan.tokens), rows.counts), rows.parts):
            kernels.add_rows(y, tokens, kernels.widen(part))

    def send_gradients(self, rows: Array, results: Sequence[Array]) -> None:
        """Start to send gradients of y, in the experts' dtype, to the relays; `results` are those of `combine`."""
        self._results = results
        self._to_relays(rows)

    def combine_gradients(self, drows: RowsByRank, dx: Array) -> Generator[None, None, Array]:
        """As `combine`, of gradients; returns those of the assignments' weights."""
        self._inner.to_sources(drows)
        yield
        sums = self._xp.zeros((self._number, dx.shape[1]), dx.dtype)
        sorted_weights = self._inner.add_gradients(sums)
        arrived = self._xp.empty_like(sorted_weights)
        arrived[self._xp.asarray(self._sorted)] = sorted_weights
        self._to_sources(kernels.narrow(sums, drows.own.dtype), arrived)
        yield
        rows, by_node = self._exchange.finish()
        self._add(rows, dx)
        dweights = self._xp.empty_like(arrived, shape=len(self._plan.order))
        dweights[self._xp.asarray(self._plan.order)] = by_node.joined()
        return dweights
