"""Hierarchical route of tokens: a token travels once to each node that has experts of it, then within the node.

Every rank has a *relay* on each other node, the rank at the same place on that node. Token t of rank 0, with two
experts on the node of ranks 2 and 3, one on either::

    direct         0 -> 2, 0 -> 3             results: 2 -> 0, 3 -> 0
    hierarchical   0 -> 2, then 2 -> 3        results: 3 -> 2, their weighted sum 2 -> 0

So at most min(k, nodes) copies of a token cross the network, and as many sums of results (DeepSeek-V3,
arXiv:2412.19437, section 3.2.2). Within its node a relay uses a direct route, as if the tokens were its own.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallel.nn import kernels
from parallel.nn.expert_group import Assignments
from parallel.runtime.vector_memory import to_host
from parallel.sharding.expert.direct_route import DirectRoute
from parallel.sharding.expert.row_codec import RowCodec
from parallel.sharding.expert.row_exchange import Notes, RowExchange, RowsByRank, segments
from quant.types import Array


def relays(nodes: Sequence[int]) -> np.ndarray:
    """Relay of every rank on every node, of shape (ranks, nodes). On its own node it is the rank itself.

    >>> relays([0, 0, 0, 0, 1, 1]).tolist()
    [[0, 4], [1, 4], [2, 5], [3, 5], [0, 4], [2, 5]]
    """
    members = [np.flatnonzero(np.equal(nodes, node)) for node in range(max(nodes) + 1)]
    places = [(int(np.searchsorted(members[node], rank)), len(members[node])) for rank, node in enumerate(nodes)]
    return np.array([[each[place * len(each) // width] for each in members] for place, width in places])


class TokensByNode(NamedTuple):
    """Tokens of a rank by the node of their experts, each once. The tokens of a node lie together, in relay order.

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
        wanted = np.zeros((len(relay), tokens.max(initial=-1) + 1), bool)
        wanted[where, tokens] = True
        unique = [np.flatnonzero(some) for some in wanted]
        copies = [(np.cumsum(some) - 1)[tokens[one]] for some, one in zip(wanted, by_node)]
        ascending = np.argsort(relay)  # messages lie in the order of ranks, not of nodes
        return cls(
            np.concatenate([unique[node] for node in ascending]),
            np.array([len(some) for some in unique]),
            np.concatenate([by_node[node] for node in ascending]),
            np.concatenate([copies[node] for node in ascending]),
            np.array([len(some) for some in by_node]),
            np.array([*map(len, unique), *chosen.counts]),
        )


class HierarchicalRoute:
    """Route with the interface of `DirectRoute`, over relays.

    Sums of results are rounded to their dtype before they cross the network.

    Methods that wait for one exchange and start another are generators that yield after each start, so that several
    routes, of different tokens, can alternate. They return the same values as in `DirectRoute`.

    Parameters
    ----------
    axis, owners, chosen
        See `DirectRoute`.
    plan : TokensByNode
        Of the same assignments.
    every : array of int64, of shape (ranks, nodes + experts)
        `TokensByNode.numbers` of every rank.
    code : str
        `RowCodec` format of tokens and their gradients until they reach a rank, and of sums between nodes.
    nodes : sequence of int
        Node of every rank of the axis, numbered from 0.
    local : MeshAxis, optional
        Ranks of the axis on this rank's node, in the same order. Their exchange then sends no empty messages to other
        nodes, unlike one along the whole axis.

    Attributes
    ----------
    sends : list of int
        Rows that this rank sends to each, itself included: to relays, and as a relay.
    """

    def __init__(
        self,
        axis: Any,
        owners: Sequence[int],
        chosen: Assignments,
        plan: TokensByNode,
        every: np.ndarray,
        code: str,
        nodes: Sequence[int],
        local: Any = None,
    ):
        self._axis, self._code, self._chosen, self._plan = axis, code, chosen, plan
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
        at_relays = np.zeros_like(counts)
        np.add.at(at_relays, (self._relays[:, home][:, None], np.flatnonzero(here)), counts[:, here])
        relayed = [int(some.sum()) for some in segments(at_relays[axis.rank], owners)]
        self.sends: list[int] = [copies + rows for copies, rows in zip(self._copies[0], relayed)]
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
    def received(self) -> np.ndarray:
        """Rows from each rank for each expert of this rank: numbers from relays. Only after `receive`."""
        return self._inner.received

    def _set_format(self, width: int, dtype: np.dtype) -> None:
        """Set the format of rows, and the number of rows behind each rank's for positions and weights."""
        self._codec, note = RowCodec(self._code, width, dtype), 4 + self._chosen.weights.itemsize
        self._margins = [[-(-count * note // self._codec.nbytes) for count in some] for some in self._assigned]

    def _arrays(self, like: Array, incoming: bool) -> RowsByRank:
        """New array for rows from sources or relays (`incoming`), or for them, of the width and dtype of `like`."""
        counts, margins = self._copies[incoming], self._margins[incoming]
        rows = self._xp.empty((sum(counts) + sum(margins), *like.shape[1:]), like.dtype)
        return RowsByRank.divided(rows, counts, self._axis.rank, margins)

    def _to_relays(self, rows: Array, notes: Notes | None = None) -> None:
        """Start to send rows (tokens, ...), once to each node, and arrays of the assignments, ordered by node."""
        arrived = self._arrays(rows, True)
        copies = self._arrays(rows, False)._replace(own=arrived.own)
        for tokens, into in zip(segments(self._xp.asarray(self._plan.tokens), copies.counts), copies.parts):
            kernels.take_rows(rows, tokens, into)
        self._exchange = RowExchange(self._axis, copies, arrived, notes)

    def send(self, tokens: Array) -> None:
        """Start to send tokens (tokens, width) to their relays, with their assignments on the relay's node."""
        self._set_format(tokens.shape[1], tokens.dtype)
        copies = self._xp.asarray(self._plan.copies.astype(np.int32))
        weights = self._chosen.weights[self._xp.asarray(self._plan.order)]
        self._to_relays(self._codec.encode(tokens), Notes([copies, weights], *self._assigned))

    def receive(self) -> Generator[None, None, RowsByRank]:
        """Rows that were sent to this rank's experts, by `send` or `send_gradients`: of a relay, by expert."""
        arrived = self._exchange.finish()
        rows, notes, codec = arrived.others, self._exchange.notes(), self._codec
        if notes:
            copies, weights = notes
            order, starts = self._xp.asarray(self._sorted), np.repeat(arrived.starts, self._assigned[1])
            self._number = len(rows)
            tokens = (self._xp.asarray(starts) + copies)[order]
            relayed = Assignments(tokens, self._at_relays[self._local.rank].tolist(), weights[order])
            self._inner = DirectRoute(self._local, self._owners, relayed, (self._code, ""), self._at_relays)
            self._inner.send_encoded(rows, codec.width, codec.dtype)
        else:
            upper = kernels.widen(codec.decode(rows))
            self._inner.send_gradients(upper, self._results, codec.dtype, rows)
        yield
        return self._inner.receive()

    def combine(self, results: RowsByRank, y: Array) -> Generator[None, None, list[Array]]:
        """Send results to the relays, and their weighted sums to the sources. Add these to y, in the order of relays.

        Returns the results of the assignments that this rank relayed.
        """
        self._inner.to_sources(results)
        yield
        sums = self._xp.zeros((self._number, y.shape[1]), y.dtype)
        mine = self._inner.add_results(sums)
        self._to_sources(sums)
        yield
        self._add(self._exchange.finish(), y)
        return mine

    def _to_sources(self, sums: Array, notes: Notes | None = None) -> None:
        """Start to send sums to the ranks of their tokens, with arrays of the assignments that this rank relayed."""
        rank, counts, margins = self._axis.rank, self._copies[1], self._margins[1]
        rows = RowsByRank.divided(kernels.narrow(sums, self._codec.dtype), counts, rank, margins).encoded(self._codec)
        arrived = self._arrays(rows.others, False)._replace(own=rows.own)
        self._exchange = RowExchange(self._axis, rows, arrived, notes)

    def _add(self, rows: RowsByRank, y: Array) -> None:
        """Add sums of relays to the rows of their tokens."""
        tokens = segments(self._xp.asarray(self._plan.tokens), rows.counts)
        for rank, (places, part) in enumerate(zip(tokens, rows.parts)):
            if rank == rows.rank:
                kernels.add_rows(y, places, kernels.widen(part))
            else:
                self._codec.add(y, places, part)

    def send_gradients(self, rows: Array, results: Sequence[Array]) -> None:
        """Start to send gradients of y, in the experts' dtype, to the relays. `results` are from `combine`."""
        self._results = results
        self._set_format(rows.shape[1], rows.dtype)
        self._to_relays(self._codec.encode(rows))

    def combine_gradients(self, drows: RowsByRank, dx: Array) -> Generator[None, None, Array]:
        """Like `combine`, for gradients. Returns the gradients of the assignments' weights."""
        self._inner.to_sources(drows)
        yield
        sums = self._xp.zeros((self._number, dx.shape[1]), dx.dtype)
        sorted_weights = self._inner.add_gradients(sums)
        arrived = self._xp.empty_like(sorted_weights)
        arrived[self._xp.asarray(self._sorted)] = sorted_weights
        self._to_sources(sums, Notes([arrived], *self._assigned[::-1]))
        yield
        self._add(self._exchange.finish(), dx)
        (by_node,) = self._exchange.notes()
        dweights = self._xp.empty_like(arrived, shape=len(self._plan.order))
        dweights[self._xp.asarray(self._plan.order)] = by_node
        return dweights
