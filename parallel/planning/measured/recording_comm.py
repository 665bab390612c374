"""Communicator that only records exchanges, to time one rank's share of operators that are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from parallel.sharding.device_mesh import MeshPlace
from parallel.sharding.mesh import Mesh
from quant.types import Array

MESSAGE = "message"
"""Name of a message between two ranks of an axis."""


class AxisExchange(NamedTuple):
    """Collective among the ranks of an axis: its name in the catalogue, and bytes of the whole. Or a `MESSAGE`."""

    collective: str
    nbytes: int
    axis: str = ""


class RecordingComm:
    """Communicator of an axis whose collectives return at once, with this rank's own values, and are recorded.

    It has the methods that `parallel.sharding.tensor.exchange` and `parallel.sharding.context.messages` call. Results
    have the shapes of real ones, and finite values. Communicators of several axes may share a list of `exchanges`.
    """

    nodes = None

    def __init__(self, axis: str = "", exchanges: list[AxisExchange] | None = None) -> None:
        self.axis, self.exchanges = axis, [] if exchanges is None else exchanges

    def take(self) -> list[AxisExchange]:
        """Exchanges since the last call."""
        found = list(self.exchanges)
        self.exchanges.clear()
        return found

    def _note(self, collective: str, nbytes: int) -> None:
        self.exchanges.append(AxisExchange(collective, nbytes, self.axis))

    def Allreduce(self, terms: Array, total: Array, op: Any = None, algorithm: str = "auto") -> None:
        self._note("allreduce", terms.nbytes)
        total[...] = terms

    def Allgatherv(self, part: Array, whole: tuple[Array, Sequence[int]]) -> None:
        vector, counts = whole
        self._note("allgatherv", vector.nbytes)
        flat, start = vector.reshape(-1), 0
        for count in counts:
            flat[start : start + count] = part.reshape(-1)[:1]
            start += count

    def Reduce_scatter(self, terms: Array, part: Array, counts: Sequence[int], algorithm: str = "auto") -> None:
        self._note("reduce_scatter", terms.nbytes)
        part.reshape(-1)[...] = terms.reshape(-1)[: part.size]

    def Alltoallv(self, sent: tuple[Array, Sequence[int]], received: tuple[Array, Sequence[int]]) -> None:
        self._note("alltoallv", sent[0].nbytes)
        received[0][...] = sent[0].reshape(-1)[:1]

    def Isend(self, part: Any, dest: int, tag: int = 0) -> DoneRequest:
        self._note(MESSAGE, _array(part).nbytes)
        return DoneRequest()

    def Irecv(self, part: Any, source: int, tag: int = 0) -> DoneRequest:
        _array(part)[...] = 0
        return DoneRequest()


class RecordingPlace(MeshPlace):
    """Place of rank 0 on a mesh, whose communicators append what they record to a list of exchanges."""

    def __init__(self, mesh: Mesh, exchanges: list[AxisExchange]) -> None:
        super().__init__(mesh, 0)
        self._exchanges = exchanges

    def _comm(self, key: tuple[str, ...], number: int) -> RecordingComm:
        return RecordingComm(",".join(key), self._exchanges)


def _array(part: Any) -> Array:
    """Array of a message that is given alone or with its MPI datatype."""
    return part[0] if isinstance(part, (list, tuple)) else part


class DoneRequest:
    """Request of a message that is complete."""

    def Test(self) -> bool:
        return True
