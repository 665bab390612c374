"""Types that several layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Wait(NamedTuple):
    """Completion of messages: `wait` blocks until they are complete, `test` makes progress."""

    wait: Callable[[], object]
    test: Callable[[], bool]
