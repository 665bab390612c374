"""Types that several layers share."""

from collections.abc import Callable
from typing import NamedTuple


class Wait(NamedTuple):
    """Completion of pending work: `wait` blocks until complete, `test` makes progress and returns True if complete."""

    wait: Callable[[], object]
    test: Callable[[], bool]
