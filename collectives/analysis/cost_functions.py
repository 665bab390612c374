"""What messages and additions cost: the clocks that schedules are priced with.

A cost is a function from bytes to seconds: a `Line` is alpha + bytes * beta, a `Curve` goes through what was measured.
Through memory that ranks share it is the ranks themselves who move the bytes, so one that sends and receives at once
needs longer for either: the cost is then `Twofold`. All functions here take numbers or arrays of them.

>>> network = Clustered((0, 0, 1), inside=Line(1.0, 0.5), between=Line(8.0, 2.0), adding=Line(0, 0.25))
>>> float(network.message(0, 1, 10)), float(network.message(1, 2, 10)), network.combine(10)
(6.0, 28.0, 2.5)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np


class Cost(Protocol):
    """A function from bytes to seconds; numbers or arrays."""

    def __call__(self, nbytes: Any, both: Any = False) -> Any:
        """Seconds for so many bytes; `both` says whether a rank of theirs both sends and receives in the round."""
        ...


class Line(NamedTuple):
    """`alpha` seconds for anything at all, `beta` seconds a byte."""

    alpha: float
    beta: float

    def __call__(self, nbytes: Any, both: Any = False) -> Any:
        """Seconds for so many bytes."""
        return self.alpha + nbytes * self.beta


class Curve(NamedTuple):
    """Straight from one measured length to the next, and on beyond the last; below the first all cost the same.

    Attributes
    ----------
    lengths : tuple of float
        Bytes, ascending.
    seconds : tuple of float
        What each of these lengths took.
    """

    lengths: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, nbytes: Any, both: Any = False) -> Any:
        """Seconds for so many bytes."""
        known = np.interp(nbytes, self.lengths, self.seconds)
        if len(self.lengths) < 2:
            return known
        (before, last), (low, high) = self.lengths[-2:], self.seconds[-2:]
        return known + np.maximum(0, nbytes - last) * max(0.0, (high - low) / (last - before))


class Twofold(NamedTuple):
    """One cost where ranks only send or only receive in a round, `alone`, and another where one does both."""

    alone: Cost
    both: Cost

    def __call__(self, nbytes: Any, both: Any = False) -> Any:
        """Seconds for so many bytes."""
        return np.where(both, self.both(nbytes, both), self.alone(nbytes, both))


class Network(Protocol):
    """What a message and an addition cost, in bytes and seconds."""

    @property
    def cards(self) -> Sequence[int] | None:
        """The node of every rank, where the ranks of a node share one card to all others; None if nobody shares.

        Messages that leave a node in the same round, or come to it, get equal shares of the card, of which there are
        as many as ranks that send or as ranks that receive, whichever is less: a rank does one after another. A message
        of n bytes that has one share of k costs what one of k n bytes would by itself.
        """
        ...

    def message(self, source: Any, target: Any, nbytes: Any, both: Any) -> Any:
        """Seconds that a message takes; `both` says whether one of its ranks also does the other thing in the round."""
        ...

    def combine(self, nbytes: Any, both: Any) -> Any:
        """Seconds to combine so many bytes that have come; `both` says whether the rank also sends in the round."""
        ...


class Uniform(NamedTuple):
    """Every edge alike: `alpha` seconds a message, `beta` seconds a byte, `gamma` seconds to combine a byte."""

    alpha: float
    beta: float
    gamma: float

    @property
    def cards(self) -> None:
        """Nobody shares a card."""

    def message(self, source: Any, target: Any, nbytes: Any, both: Any = False) -> Any:
        """The same for all ranks."""
        return self.alpha + nbytes * self.beta

    def combine(self, nbytes: Any, both: Any = False) -> Any:
        """The same for all ranks."""
        return nbytes * self.gamma


class Clustered(NamedTuple):
    """Ranks on nodes: one cost within a node, another between nodes.

    Attributes
    ----------
    nodes : tuple of int
        The node of every rank.
    inside, between, adding : Cost
        Seconds for a message within a node, for one between nodes, and to combine.
    shared : bool
        Whether all ranks of a node share one card to the others.
    """

    nodes: tuple[int, ...]
    inside: Cost
    between: Cost
    adding: Cost
    shared: bool = True

    @property
    def cards(self) -> tuple[int, ...] | None:
        """The nodes, if they share."""
        return self.nodes if self.shared else None

    def message(self, source: Any, target: Any, nbytes: Any, both: Any = False) -> Any:
        """By the wire that the two ranks share."""
        nodes = np.asarray(self.nodes)
        return np.where(nodes[source] == nodes[target], self.inside(nbytes, both), self.between(nbytes, both))

    def combine(self, nbytes: Any, both: Any = False) -> Any:
        """The same for all ranks."""
        return self.adding(nbytes, both)
