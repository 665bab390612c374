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
from typing import NamedTuple


class ConsistencyRule(NamedTuple):
    """Consistency rule: its name on the command line, and its staleness, infinite for ``async``."""

    name: str
    staleness: float

    def allows(self, clock: int, least: int) -> bool:
        """True if a read for step `clock` is allowed once every worker has made `least` steps."""
        return clock - least <= self.staleness

    @property
    def synchronous(self) -> bool:
        """True if the gradients of a step form one update (staleness 0)."""
        return self.staleness == 0


STALENESS = {"bsp": 0, "async": math.inf}
"""Rules without a parameter."""


def rule_of(text: str) -> ConsistencyRule:
    """Parse a rule such as ``ssp:3``; ValueError for others."""
    if text in STALENESS:
        return ConsistencyRule(text, STALENESS[text])
    name, colon, number = text.partition(":")
    if name != "ssp" or not colon:
        raise ValueError(f"consistency: expected bsp, ssp:S or async, found {text!r}")
    try:
        staleness = int(number)
    except ValueError:
        raise ValueError(f"consistency: expected ssp:S with a whole number S, found {text}") from None
    if staleness < 0:
        raise ValueError(f"consistency: expected a staleness from 0 on, found {staleness}")
    return ConsistencyRule(text, staleness)


GONE = 1 << 62
"""Clock of a dead worker."""


class WorkerClocks:
    """Clocks of all workers, as known to one server, initially `start`."""

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
