"""How far workers may drift apart: what is to be known before a worker may read. Knows no MPI.

A worker's clock is the number of steps that it has taken its part in. Who has taken part in c of them, and reads for
the next, must not miss what any worker has pushed in its first c - s: s is the staleness. (Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.)

>>> bsp, ssp, free = rule_of("bsp"), rule_of("ssp:3"), rule_of("async")
>>> clocks = Clocks(3)
>>> for worker, clock in ((0, 4), (1, 5), (2, 4)):
...     clocks.tick(worker, clock)
>>> [rule.allows(7, clocks.least) for rule in (bsp, ssp, free)]
[False, True, True]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Rule(NamedTuple):
    """A kind of consistency.

    Attributes
    ----------
    name : str
        As on the command line.
    staleness : float
        The largest gap between a reader's clock and the slowest worker's; infinite if nobody ever waits.
    """

    name: str
    staleness: float

    def allows(self, clock: int, least: int) -> bool:
        """Whether who reads for step `clock` may do so when every worker has made `least` steps."""
        return clock - least <= self.staleness

    @property
    def together(self) -> bool:
        """Whether the gradients of a step are one update: if nobody may miss any of them, nobody may have some."""
        return self.staleness == 0


def _number(text: str) -> float:
    try:
        staleness = int(text)
    except ValueError:
        raise ValueError(f"consistency: expected ssp:S with a whole number S, found ssp:{text}") from None
    if staleness < 0:
        raise ValueError(f"consistency: expected a staleness from 0 on, found {staleness}")
    return staleness


RULES: dict[str, Callable[[str], float]] = {
    "bsp": lambda text: 0,
    "ssp": _number,
    "async": lambda text: math.inf,
}
"""Staleness by name, from what stands behind the colon."""

FORMS = "bsp, ssp:S or async"


def rule_of(text: str) -> Rule:
    """The rule that a text like ``ssp:3`` names.

    Raises
    ------
    ValueError
        If there is none, or the staleness is no whole number from 0 on.
    """
    name, colon, rest = text.partition(":")
    if name not in RULES or bool(colon) != (name == "ssp"):
        raise ValueError(f"consistency: expected {FORMS}, found {text!r}")
    return Rule(text, RULES[name](rest))


GONE = 1 << 62
"""The clock of a dead worker."""


class Clocks:
    """The steps that each worker has taken its part in, as far as one server has heard.

    Parameters
    ----------
    workers : int
    start : int
        Where all of them stand.
    """

    def __init__(self, workers: int, start: int = 0):
        self.vector = [start] * workers

    @property
    def least(self) -> int:
        """Of the slowest."""
        return min(self.vector)

    def leave(self, worker: int) -> None:
        """A worker is dead: nobody waits for it."""
        self.vector[worker] = GONE

    def tick(self, worker: int, clock: int) -> None:
        """A worker has made so many steps. To hear it twice, or late, changes nothing."""
        self.vector[worker] = max(self.vector[worker], clock)
