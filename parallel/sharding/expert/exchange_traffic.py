"""Tokens that ranks exchange, and the time that it takes, for reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallel.nn.pass_mode import PassMode
from parallel.runtime.interleaving import own_time


class ExchangeTraffic:
    """Numbers on the exchanges of an operator in a micro-batch's passes. A ``with`` block adds its seconds.

    Parameters
    ----------
    run : PassMode
        Gets the numbers in `traffic` and `seconds`.
    name : str
        Logical name of the operator.
    """

    def __init__(self, run: PassMode, name: str):
        self._run, self._name = run, name

    def _add(self, word: str, number: int) -> None:
        self._run.traffic[self._name, word] = self._run.traffic.get((self._name, word), 0) + number

    def add_copies(self, sends: Sequence[int], axis: Any) -> None:
        """Count rows that this rank sends to each rank of the axis."""
        nodes = (axis.comm.nodes if axis.size > 1 else None) or (0,) * axis.size
        self._add("copies", sum(sends) - sends[axis.rank])
        self._add("between nodes", sum(count for count, node in zip(sends, nodes) if node != nodes[axis.rank]))

    def __enter__(self) -> None:
        self._began = own_time()

    def __exit__(self, *_: object) -> None:
        seconds = own_time() - self._began
        self._run.seconds[self._name] = self._run.seconds.get(self._name, 0.0) + seconds
