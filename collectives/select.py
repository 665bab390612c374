"""Which algorithm a call runs: the cheapest by the catalogue's formulas, from what is equal on all ranks only."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mpi4py import MPI

from collectives import catalog
from collectives.chunks import Layout, even
from collectives.errors import InvalidArgument
from collectives.placement import Nodes
from collectives.semantics import vector
from collectives.walk import Uniform, price

BUILT_IN = Uniform(alpha=1.5e-6, beta=1 / 9e9, gamma=1 / 20e9)
"""Seconds a message, a byte, a combined byte, of ranks on one node, where nothing was measured."""


WORTH_CUTTING = 1 << 23
"""Bytes from which an allreduce around a ring is pipelined in segments."""

SEGMENT = 1 << 18
"""Bytes that a block of a segment must have at least."""

MOST_SEGMENTS = 8


class Choice(NamedTuple):
    """An algorithm's name, and in how many segments the data is pipelined through it."""

    algorithm: str
    segments: int = 1


@lru_cache(maxsize=4096)
def choose(
    collective: str,
    size: int,
    nbytes: int,
    ordered: bool = False,
    private: bool = False,
    nodes: Nodes | None = None,
) -> Choice:
    """The cheapest algorithm that can do it, and that gives all ranks the same bits.

    Parameters
    ----------
    collective : str
        A name in the catalogue.
    size, nbytes : int
        Ranks; bytes of the whole vector, or of all blocks together.
    ordered : bool
        Whether the operation needs rank order.
    private : bool
        Whether ranks know only their own block's length; `nbytes` must then not matter and is not looked at.
    nodes : tuple of int, optional
        Which ranks share a node. Not looked at yet: what is chosen does not depend on it.
    """
    entries = catalog.CATALOG[collective].items()
    able = {n: e for n, e in entries if e.alike and not e.placed and _fits(e, ordered, private)}
    if private:
        return Choice(next(iter(able)))
    name = min(able, key=lambda name: able[name].seconds(size, nbytes, *BUILT_IN))
    return Choice(name, _segments(collective, name, size, nbytes))


def _segments(collective: str, name: str, size: int, nbytes: int) -> int:
    """Into how many segments to cut: a sum is sent on while it is still in the cache, if blocks are long enough."""
    if (collective, name) != ("allreduce", "ring") or nbytes < WORTH_CUTTING:
        return 1
    return max(1, min(MOST_SEGMENTS, nbytes // (size * SEGMENT)))


def check(
    collective: str,
    algorithm: str,
    ordered: bool = False,
    private: bool = False,
    nodes: Nodes | None = None,
) -> None:
    """Refuse an algorithm that the user named and that is unknown or cannot do the call."""
    try:
        entry = catalog.find(collective, algorithm)
    except ValueError as error:
        raise InvalidArgument(MPI.ERR_ARG, f"algorithm: {error}") from None
    if not _fits(entry, ordered, private):
        able = [n for n, e in catalog.CATALOG[collective].items() if _fits(e, ordered, private)]
        why = (
            "needs to know the lengths of all blocks, which only the root does"
            if private and not entry.private
            else "does not keep rank order, which an operation that does not commute needs"
        )
        raise InvalidArgument(MPI.ERR_ARG, f"algorithm: {algorithm!r} for {collective} {why}; able: {', '.join(able)}")


def _fits(entry: catalog.Algorithm, ordered: bool, private: bool) -> bool:
    return (entry.ordered or not ordered) and (entry.private or not private)


@lru_cache(maxsize=4096)
def predict(collective: str, algorithm: str, size: int, nbytes: int, segments: int = 1) -> float:
    """Seconds that the model expects, by playing the schedule on the clock.

    Parameters
    ----------
    collective, algorithm : str
        Names in the catalogue.
    size, nbytes : int
        Ranks; bytes of the whole vector, or of all blocks together.
    segments : int
        Into how many segments the data is cut.

    Returns
    -------
    float
        Seconds from the common start until the last rank is done, for root 0.
    """
    blocks = catalog.blocks(collective, algorithm, size)
    held_by_all = nbytes * blocks // vector(collective, size, blocks)
    layout = Layout.packed(even(held_by_all, blocks * segments))
    schedules = catalog.build_all(collective, algorithm, size, 0, segments)
    return price(schedules, layout, 1, BUILT_IN).seconds
