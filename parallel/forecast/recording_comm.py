"""Communicator that only records exchanges, to time one rank's share of operators that are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from quant.types import Array

MESSAGE = "message"
"""Name of a message between two ranks of an axis."""


class TensorExchange(NamedTuple):
    """Collective among the ranks of an axis: its name in the catalogue, and bytes of the whole; or a `MESSAGE`."""

    collective: str
    nbytes: int


class RecordingComm:
    """Communicator of an axis whose collectives return at once, with this rank's own values, and are recorded.

    It has the methods that `parallel.tensor.exchange` calls. Results have the shapes of real ones, and finite values.
    """

    nodes = None

    def __init__(self) -> None:
        self.exchanges: list[TensorExchange] = []

    def take(self) -> list[TensorExchange]:
        """Exchanges since the last call."""
        found, self.exchanges = self.exchanges, []
        return found

    def Allreduce(self, terms: Array, total: Array, op: Any = None, algorithm: str = "auto") -> None:
        self.exchanges.append(TensorExchange("allreduce", terms.nbytes))
        total[...] = terms

    def Allgatherv(self, part: Array, whole: tuple[Array, Sequence[int]]) -> None:
        vector, counts = whole
        self.exchanges.append(TensorExchange("allgatherv", vector.nbytes))
        flat, start = vector.reshape(-1), 0
        for count in counts:
            flat[start : start + count] = part.reshape(-1)[:1]
            start += count

    def Reduce_scatter(self, terms: Array, part: Array, counts: Sequence[int], algorithm: str = "auto") -> None:
        self.exchanges.append(TensorExchange("reduce_scatter", terms.nbytes))
        part.reshape(-1)[...] = terms.reshape(-1)[: part.size]

    def Isend(self, part: Array, dest: int, tag: int = 0) -> DoneRequest:
        self.exchanges.append(TensorExchange(MESSAGE, part.nbytes))
        return DoneRequest()

    def Irecv(self, part: Array, source: int, tag: int = 0) -> DoneRequest:
        part[...] = 0
        return DoneRequest()


class DoneRequest:
    """Request of a message that is complete."""

    def Test(self) -> bool:
        return True
