"""Consistency rules: limits on the staleness of weights that a worker may read. No MPI.

A worker's clock counts its finished steps. A read for step c must include all pushes of every worker's first c - s
steps, where s is the staleness. (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013.)

>>> bsp, ssp, free = rule_of("bsp"), rule_of("ssp:3"), rule_of("async")
>>> clocks = WorkerClocks(3)
>>> for worker, clock in ((0, 4), (1, 5), (2, 4)):
...     clocks.tick(worker, clock)
>>> [rule.allows(7, clocks.least) for rule in (bsp, ssp, free)]
[False, True, True]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class ConsistencyRule(NamedTuple):
    """Consistency rule.

    Attributes
    ----------
    name : str
        As on the command line.
    staleness : float
        Largest gap between a reader's clock and the slowest worker's; infinite for ``async``.
    """

    name: str
    staleness: float

    def allows(self, clock: int, least: int) -> bool:
        """True if a read for step `clock` is allowed once every worker has made `least` steps."""
        return clock - least <= self.staleness

    @property
    def synchronous(self) -> bool:
        """True if the gradients of a step form one update (staleness 0)."""
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
"""Staleness by name, from the text after the colon."""

FORMS = "bsp, ssp:S or async"


def rule_of(text: str) -> ConsistencyRule:
    """Parse a rule such as ``ssp:3``.

    Raises
    ------
    ValueError
        If the name is unknown, or the staleness is not a whole number of at least 0.
    """
    name, colon, rest = text.partition(":")
    if name not in RULES or bool(colon) != (name == "ssp"):
        raise ValueError(f"consistency: expected {FORMS}, found {text!r}")
    return ConsistencyRule(text, RULES[name](rest))


GONE = 1 << 62
"""Clock of a dead worker."""


class WorkerClocks:
    """Clocks of all workers, as known to one server.

    Parameters
    ----------
    workers : int
    start : int
        Initial clock.
    """

    def __init__(self, workers: int, start: int = 0):
        self.vector = [start] * workers

    @property
    def least(self) -> int:
        """Clock of the slowest worker."""
        return min(self.vector)

    def leave(self, worker: int) -> None:
        """Exclude a dead worker."""
        self.vector[worker] = GONE

    def tick(self, worker: int, clock: int) -> None:
        """Advance a worker's clock; duplicates and late ticks have no effect."""
        self.vector[worker] = max(self.vector[worker], clock)
