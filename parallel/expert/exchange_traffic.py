"""Tokens that ranks exchange, and the time that it takes, for reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


class ExchangeTraffic:
    """Numbers on the exchanges of an operator in a micro-batch's passes; a ``with`` block adds its seconds.

    Parameters
    ----------
    numbers : dict
        `PassMode.traffic`.
    name : str
        Logical name of the operator.
    """

    def __init__(self, numbers: dict[tuple[str, str], float], name: str):
        self._numbers, self._name = numbers, name

    def add(self, word: str, number: float) -> None:
        self._numbers[self._name, word] = self._numbers.get((self._name, word), 0) + number

    def add_copies(self, sends: Sequence[int], axis: Any) -> None:
        """Count rows that this rank sends to each rank of the axis."""
        nodes = (axis.comm.nodes if axis.size > 1 else None) or (0,) * axis.size
        self.add("copies", sum(sends) - sends[axis.rank])
        self.add("between nodes", sum(count for count, node in zip(sends, nodes) if node != nodes[axis.rank]))

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.add("seconds", time.perf_counter() - self._began)
