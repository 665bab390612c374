"""Base of compressed collectives. Each is bound to vectors of one length."""

from collections import deque
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, Self

import numpy as np

from collectives.runtime.requests.request import Request
from collectives.runtime.requests.request_lists import wait_all
from quant.kernels import array_namespace

Motion = Iterator[list[Request]]
"""A collective in progress: yields lists of requests to wait for.

Flat collectives yield equally often on all ranks. Leaders of nodes (`HierarchicalAllreduce`) more often than
others."""


def module_of(like: Any) -> ModuleType:
    """Module of the arrays of a collective: NumPy for None, otherwise CuPy.

    `like` is the module or one of its arrays.
    """
    return np if like is None else like if isinstance(like, ModuleType) else array_namespace(like)


def run(motion: Motion) -> None:
    """Run a collective to completion: wait for each list of requests that `motion` yields."""
    for requests in motion:
        wait_all(requests)


IN_FLIGHT = 2
"""Collectives whose messages are in flight at a time."""


def staggered(motions: Iterable[Motion]) -> Motion:
    """Interleave collectives so that one computes while messages of others are in flight. Yield requests to wait for.

    The order of progress is fixed and does not depend on time, so all ranks start their messages in the same order.
    At most `IN_FLIGHT` collectives have messages in flight at a time.
    """
    waiting, active = deque(motions), deque[tuple[Motion, list[Request]]]()
    while waiting or active:
        motion, requests = active.popleft() if len(active) == IN_FLIGHT or not waiting else (waiting.popleft(), [])
        if requests:
            yield requests
        following = next(motion, None)
        if following is not None:
            active.append((motion, following))


class BoundCollective:
    """Base of collectives bound to one vector length, used many times, and closed. `with` closes only on success."""

    def close(self) -> None:
        """Free the MPI requests and communicators that this object created. Collective."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # a rank that failed does not wait for the others
            self.close()
