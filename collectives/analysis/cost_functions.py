"""Cost functions of messages and reductions, for simulated time.

A cost is a function from bytes to seconds: a `LinearCost` is alpha + bytes * beta, a `PiecewiseCost` interpolates
measurements. In shared memory the ranks themselves move the bytes, so a rank that sends and receives at once needs
longer for either: the cost is then `SharedCardCost`. All functions of this module take numbers or arrays of numbers.

>>> inside, between, adding = LinearCost(1.0, 0.5), LinearCost(8.0, 2.0), LinearCost(0, 0.25)
>>> network = ClusteredNetwork((0, 0, 1), inside=inside, between=between, adding=adding)
>>> float(network.message(0, 1, 10)), float(network.message(1, 2, 10)), network.combine(10)
(6.0, 28.0, 2.5)
"""

from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np


class EdgeCost(Protocol):
    """Protocol of cost functions: bytes -> seconds, for numbers or arrays."""

    def __call__(self, nbytes: Any, both: Any = False) -> Any:
        """Seconds for `nbytes`. `both` is True where a rank sends and receives in the same round."""


class LinearCost(NamedTuple):
    """Cost of `alpha` seconds per message and `beta` seconds per byte."""

    alpha: float
    beta: float

    def __call__(self, nbytes: Any, both: Any = False) -> Any:
        return self.alpha + nbytes * self.beta


class PiecewiseCost(NamedTuple):
    """Cost interpolated between measured lengths, extrapolated linearly beyond the last, constant below the first."""

    lengths: tuple[float, ...]  # bytes, ascending
    seconds: tuple[float, ...]  # of each length

    def __call__(self, nbytes: Any, both: Any = False) -> Any:
        known = np.interp(nbytes, self.lengths, self.seconds)
        if len(self.lengths) < 2:
            return known
        (before, last), (low, high) = self.lengths[-2:], self.seconds[-2:]
        return known + np.maximum(0, nbytes - last) * max(0.0, (high - low) / (last - before))


class SharedCardCost(NamedTuple):
    """Cost that is `both` where a rank sends and receives in the same round, and `alone` elsewhere."""

    alone: EdgeCost
    both: EdgeCost

    def __call__(self, nbytes: Any, both: Any = False) -> Any:
        return np.where(both, self.both(nbytes, both), self.alone(nbytes, both))


class UniformNetwork(NamedTuple):
    """Network with equal edges: `alpha` seconds per message, `beta` per byte, `gamma` to combine a byte.

    `overhead`: seconds of each further message that a rank has under way at the same time. None if that is `alpha`.
    Only the catalogue's formulas distinguish it.
    """

    alpha: float
    beta: float
    gamma: float
    overhead: float | None = None

    @property
    def cards(self) -> None:
        """None: no ranks share a network card."""

    def message(self, source: Any, target: Any, nbytes: Any, both: Any = False) -> Any:
        return self.alpha + nbytes * self.beta

    def combine(self, nbytes: Any, both: Any = False) -> Any:
        return nbytes * self.gamma


class ClusteredNetwork(NamedTuple):
    """Network of nodes of ranks: costs of messages within a node, of messages between nodes, and of reductions."""

    nodes: tuple[int, ...]  # of every rank
    inside: EdgeCost  # a message within a node
    between: EdgeCost
    adding: EdgeCost  # combining
    shared: bool = True  # all ranks of a node share one network card

    @property
    def cards(self) -> tuple[int, ...] | None:
        """The node of every rank, if the ranks of a node share one network card. Otherwise None.

        Messages that leave or reach a node in the same round get equal shares of its card. There are as many shares as
        ranks that send or as ranks that receive, whichever is less, since a rank sends one message after another. A
        message of n bytes with one of k shares costs as much as one of k n bytes alone.
        """
        return self.nodes if self.shared else None

    def message(self, source: Any, target: Any, nbytes: Any, both: Any = False) -> Any:
        nodes = np.asarray(self.nodes)
        return np.where(nodes[source] == nodes[target], self.inside(nbytes, both), self.between(nbytes, both))

    def combine(self, nbytes: Any, both: Any = False) -> Any:
        return self.adding(nbytes, both)


CostFunctions: TypeAlias = UniformNetwork | ClusteredNetwork
