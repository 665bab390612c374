"""Base of compressed collectives, which are bound to vectors of one length."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Self

from collectives.runtime.requests import Request, wait_all

Motion = Iterator[list[Request]]
"""A collective under way, which yields requests that it waits for.

Flat ways yield the same number of times on all ranks; leaders of nodes (`Hierarchical`) more often than others."""


def run(motion: Motion) -> None:
    """All of a motion, to its end."""
    for requests in motion:
        wait_all(requests)


def staggered(motions: Iterable[Motion], abreast: int = 2) -> Motion:
    """Several motions as one: while the messages of one are under way, another computes.

    Who goes on when is a matter of order alone, not of time, so all ranks start their messages in one order.

    Parameters
    ----------
    motions : iterable of Motion
        None needs what another leaves.
    abreast : int
        How many have messages under way at a time.
    """
    waiting, flying = deque(motions), deque[tuple[Motion, list[Request]]]()
    while waiting or flying:
        motion, requests = flying.popleft() if len(flying) == abreast or not waiting else (waiting.popleft(), [])
        if requests:
            yield requests
        following = next(motion, None)
        if following is not None:
            flying.append((motion, following))


class BoundCollective:
    """Made once for vectors of one length, used many times, and closed."""

    def close(self) -> None:
        """Give back what it holds of MPI's. Collective."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # a rank that failed does not wait for the others
            self.close()
