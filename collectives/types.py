"""Types that several layers share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Wait(NamedTuple):
    """Completion of pending work: `wait` blocks until complete, `test` makes progress and returns True if complete.

    `awaited`: exchanges or persistent messages that this is the end of; empty for all other work.
    """

    wait: Callable[[], object]
    test: Callable[[], bool]
    awaited: Sequence[Any] = ()

    @property
    def attempt(self) -> Callable[[], bool]:
        """The test, as an operation of a stream."""
        return self.test
