"""Types that several layers share."""

from collections.abc import Callable
from typing import NamedTuple


class Wait(NamedTuple):
    """Completion of pending work: `wait` blocks until complete, `test` makes progress and returns True if complete.

    `awaits` returns a description of the work.
    """

    wait: Callable[[], object]
    test: Callable[[], bool]
    awaits: Callable[[], str] = lambda: "local work, or messages of a device"
