"""Cost of a collective among ranks that share a GPU and move their messages through pinned host memory.

All copies to the GPU take one link, and all copies from it the other direction: the bytes of all messages count,
whichever ranks send them, and segments bring no gain. A message that another one waits for also costs the latency of
its two copies, from start to end as the hosts see it.
"""

from functools import lru_cache

from collectives.algorithms import catalog
from collectives.selection.shared_cores import total_work

MESSAGE, OVERHEAD = 1e-4, 2e-5
"""Latency in seconds of a message that the next one waits for (measured: broadcast of 64 KiB by two ranks, H100), and
of one that overlaps with others."""

BETA, GAMMA = 1 / 47e9, 1 / 1e12
"""Seconds to move a byte from device to device (measured: chunks of 4 MiB, H200), and to combine a byte."""


@lru_cache(maxsize=1024)
def predict_on_shared_link(collective: str, name: str, size: int, nbytes: int) -> float:
    """Predicted seconds of an algorithm, without segments, among `size` ranks that share a GPU.

    >>> round(predict_on_shared_link("broadcast", "direct", 4, 1 << 28) * 1e3, 1)
    17.3
    """
    entry = catalog.find(collective, name)
    rounds, combined = (float(catalog.evaluate(each, size)) for each in (entry.rounds, entry.gamma or entry.combined))
    waited = float(catalog.evaluate(entry.depth, size)) if entry.depth else rounds
    moved = total_work(collective, name, size).moved
    return MESSAGE * waited + OVERHEAD * (rounds - waited) + nbytes * (BETA * moved + GAMMA * combined)
