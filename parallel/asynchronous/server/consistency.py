"""Consistency rules: limits on the staleness of weights that a worker may read. No MPI.

A worker's clock counts its finished steps. A read for step c must include all pushes of every worker's first c - s
steps, where s is the staleness. (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013.)

>>> [rule_of(text).allows(7, least=4) for text in ("bsp", "ssp:3", "async")]
[False, True, True]
"""

import math
import re
from typing import NamedTuple

STALENESS = {"bsp": 0, "async": math.inf}  # of rules without a parameter
GONE = 1 << 62  # clock of a dead worker


class ConsistencyRule(NamedTuple):
    """Consistency rule: weights may lag by at most `staleness` steps (0 for ``bsp``, infinite for ``async``)."""

    staleness: float

    def allows(self, clock: int, least: int) -> bool:
        """True if weights that contain the first `least` steps of every worker may be read for step `clock`."""
        return clock - least <= self.staleness

    @property
    def synchronous(self) -> bool:
        """True for staleness 0: the gradients of all workers in a step form one update."""
        return self.staleness == 0


def rule_of(text: str) -> ConsistencyRule:
    """Parse ``bsp``, ``async`` or ``ssp:S`` with staleness S. ValueError for other texts."""
    if text in STALENESS:
        return ConsistencyRule(STALENESS[text])
    if not (found := re.fullmatch("ssp:([0-9]+)", text)):
        raise ValueError(f"consistency: expected bsp, async, or ssp:S with a whole number S from 0 on, found {text!r}")
    return ConsistencyRule(int(found[1]))
