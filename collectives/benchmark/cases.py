"""Benchmark cases: buffers, arguments and closed-form result of one call of each collective.

Element j of rank r's input is ``(j + 3 r) mod M + s``: a small integer, so that any sum is exact.
The shift s takes three values and changes before every call, so neither stale data nor what another
contestant left behind can pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        "float32",
        "float64",
        "float16",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
        "complex64",
        "complex128",
    )
}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)

# How large an integer each dtype still holds exactly, where that is less than the pattern could ever need.
EXACT = {"float16": 2048, "bfloat16": 256, "int8": 127, "uint8": 255, "int16": 32767}
MODULUS, SHIFTS, ROOT = 31, 3, 0


def _plain(comm: MPI.Intracomm, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.empty(count, dtype)


def _symmetric(comm: Any, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The shape must be the same on all ranks, so that of the longest array is taken. Collective."""
    return comm.empty(comm.allreduce(count, MPI.MAX), dtype)[:count]


MEMORIES: dict[str, Callable[[MPI.Intracomm, int, np.dtype[Any]], NDArray[Any]]] = {
    "plain": _plain,
    "symmetric": _symmetric,
}
"""Where a program's arrays come from: NumPy, or `Communicator.empty`. All ranks ask for theirs in the same order."""


def parts(n: int, size: int) -> list[int]:
    """n elements in `size` parts whose lengths differ by one at most, the longer ones first."""
    return [n // size + (r < n % size) for r in range(size)]


@dataclass(frozen=True)
class DataPattern:
    """The closed form of all inputs, for `size` ranks and one dtype."""

    size: int
    modulus: int

    @classmethod
    def fitting(cls, size: int, dtype: np.dtype[Any]) -> DataPattern:
        """The largest pattern whose sum over all ranks stays exact in `dtype`."""
        largest = EXACT.get(dtype.name, 2**20) // size
        return cls(size, max(1, min(MODULUS, largest - (SHIFTS - 1) + 1)))

    def input(self, rank: int, start: int, stop: int) -> NDArray[np.int32]:
        return self.total([rank], start, stop)

    def total(self, ranks: Sequence[int], start: int, stop: int) -> NDArray[np.int32]:
        """The sum of the inputs of `ranks`: one period of the pattern is summed and repeated."""
        one = np.arange(start, start + self.modulus)
        period = np.sum([(one + 3 * r) % self.modulus for r in ranks], axis=0)
        return np.resize(period.astype(np.int32), stop - start)


@dataclass(frozen=True)
class CaseLayout:
    """One rank's part in one call: what it gives and must get, and how often the shift is in what it gets."""

    gives: NDArray[np.int32] | None
    gets: NDArray[np.int32] | None
    gain: int = 1


def _moved(p: DataPattern, blocks: list[tuple[int, int, int]]) -> NDArray[np.int32]:
    return np.concatenate([p.input(*block) for block in blocks])


def _broadcast(p: DataPattern, rank: int, n: int, at: list[int]) -> CaseLayout:
    data = p.input(ROOT, 0, n)
    return CaseLayout(data if rank == ROOT else None, data)


def _reduce(p: DataPattern, rank: int, n: int, at: list[int]) -> CaseLayout:
    return CaseLayout(p.input(rank, 0, n), p.total(range(p.size), 0, n) if rank == ROOT else None, p.size)


def _allreduce(p: DataPattern, rank: int, n: int, at: list[int]) -> CaseLayout:
    return CaseLayout(p.input(rank, 0, n), p.total(range(p.size), 0, n), p.size)


def _reduce_scatter(p: DataPattern, rank: int, n: int, at: list[int]) -> CaseLayout:
    return CaseLayout(p.input(rank, 0, n), p.total(range(p.size), at[rank], at[rank + 1]), p.size)


def _scatter(p: DataPattern, rank: int, n: int, at: list[int]) -> CaseLayout:
    return CaseLayout(p.input(ROOT, 0, n) if rank == ROOT else None, p.input(ROOT, at[rank], at[rank + 1]))


def _allgather(p: DataPattern, rank: int, n: int, at: list[int]) -> CaseLayout:
    return CaseLayout(p.input(rank, at[rank], at[rank + 1]), _moved(p, [(q, at[q], at[q + 1]) for q in range(p.size)]))


def _gather(p: DataPattern, rank: int, n: int, at: list[int]) -> CaseLayout:
    whole = _allgather(p, rank, n, at)
    return whole if rank == ROOT else CaseLayout(whole.gives, None)


def _alltoall(p: DataPattern, rank: int, n: int, at: list[int]) -> CaseLayout:
    return CaseLayout(p.input(rank, 0, n), _moved(p, [(q, at[rank], at[rank + 1]) for q in range(p.size)]))


def _scan(p: DataPattern, rank: int, n: int, at: list[int]) -> CaseLayout:
    return CaseLayout(p.input(rank, 0, n), p.total(range(rank + 1), 0, n), rank + 1)


def _exscan(p: DataPattern, rank: int, n: int, at: list[int]) -> CaseLayout:
    return CaseLayout(p.input(rank, 0, n), p.total(range(rank), 0, n) if rank else None, rank)


def _barrier(p: DataPattern, rank: int, n: int, at: list[int]) -> CaseLayout:
    return CaseLayout(None, None)


def _all(size: int) -> float:
    return 1.0


def _others(size: int) -> float:
    return (size - 1) / size


def _twice(size: int) -> float:
    return 2 * (size - 1) / size


@dataclass(frozen=True)
class BenchmarkCase:
    """One collective: its method, busbw as a multiple of algbw, its layout, and the form of its arguments."""

    method: str
    factor: Callable[[int], float]
    layout: Callable[[DataPattern, int, int, list[int]], CaseLayout]
    rooted: bool = False
    equal: bool = False  # every rank's block has the same length, so the total is a multiple of the ranks
    counts: str = ""  # where a v-form has its counts: with "send", "recv", "both", or an "argument" of their own
    reduces: bool = False
    home: str = ""  # in place, the input lies in the receive buffer: in "whole" or in the own "block"


CASES: dict[str, BenchmarkCase] = {
    "broadcast": BenchmarkCase("Bcast", _all, _broadcast, rooted=True),
    "reduce": BenchmarkCase("Reduce", _all, _reduce, rooted=True, reduces=True, home="whole"),
    "scatter": BenchmarkCase("Scatter", _others, _scatter, rooted=True, equal=True),
    "gather": BenchmarkCase("Gather", _others, _gather, rooted=True, equal=True, home="block"),
    "allgather": BenchmarkCase("Allgather", _others, _allgather, equal=True, home="block"),
    "reduce_scatter": BenchmarkCase(
        "Reduce_scatter_block", _others, _reduce_scatter, equal=True, reduces=True, home="whole"
    ),
    "allreduce": BenchmarkCase("Allreduce", _twice, _allreduce, reduces=True, home="whole"),
    "barrier": BenchmarkCase("Barrier", _all, _barrier),
    "alltoall": BenchmarkCase("Alltoall", _others, _alltoall, equal=True, home="whole"),
    "scan": BenchmarkCase("Scan", _all, _scan, reduces=True, home="whole"),
    "exscan": BenchmarkCase("Exscan", _all, _exscan, reduces=True, home="whole"),
    "scatterv": BenchmarkCase("Scatterv", _others, _scatter, rooted=True, counts="send"),
    "gatherv": BenchmarkCase("Gatherv", _others, _gather, rooted=True, counts="recv", home="block"),
    "allgatherv": BenchmarkCase("Allgatherv", _others, _allgather, counts="recv", home="block"),
    "reduce_scatterv": BenchmarkCase(
        "Reduce_scatter", _others, _reduce_scatter, counts="argument", reduces=True, home="whole"
    ),
    "alltoallv": BenchmarkCase("Alltoallv", _others, _alltoall, counts="both"),
}
ALIASES = {"bcast": "broadcast", "reduce_scatter_block": "reduce_scatter", "reducescatter": "reduce_scatter"}


def elements(case: BenchmarkCase, nbytes: int, itemsize: int, size: int) -> int:
    """Elements of the whole array for a size in bytes, rounded up to elements and equal blocks if needed."""
    unit = itemsize * size if case.equal else itemsize
    return -(-nbytes // unit) * (unit // itemsize)


class CaseBuffers:
    """The arrays of one rank for one case, their contents, and the arguments of the call."""

    def __init__(
        self,
        case: BenchmarkCase,
        comm: MPI.Intracomm,
        n: int,
        dtype: np.dtype[Any],
        memory: str = "plain",
        in_place: bool = False,
        disguise: bool = False,
    ) -> None:
        rank, size = comm.Get_rank(), comm.Get_size()
        counts = parts(n, size)
        starts = [sum(counts[:r]) for r in range(size + 1)]
        self.unknown_to_mpi = dtype.name in ("float16", "bfloat16")
        layout = case.layout(DataPattern.fitting(size, dtype), rank, n, starts)
        self._rank, self._gain, self._shift = rank, layout.gain, 0
        self._home: NDArray[Any] | None = None

        def array(values: NDArray[np.int32] | None, count: int | None = None) -> NDArray[Any] | None:
            length = 0 if values is None else len(values) if count is None else count
            made = MEMORIES[memory](comm, length, dtype)
            if values is None:
                return None
            made[: len(values)] = values
            return made

        self._want = None if layout.gets is None else layout.gets.astype(dtype)
        moves_home = bool(in_place and case.home and layout.gets is not None)
        whole = n if moves_home and case.home == "whole" else None
        recv = array(layout.gets, whole)
        self._gives = array(layout.gives) if case.method != "Bcast" else recv if rank == ROOT else None
        if moves_home and recv is not None:
            self._home = recv if case.home == "whole" else recv[starts[rank] : starts[rank + 1]]
        self._result = None if recv is None or self._want is None else recv[: len(self._want)]
        self._holds_input = self._home is not None or (case.method == "Bcast" and rank == ROOT)
        self._args = self._arguments(case, recv, counts, moves_home, in_place and rank == ROOT, disguise)

    def _arguments(
        self,
        case: BenchmarkCase,
        recv: NDArray[Any] | None,
        counts: list[int],
        moves_home: bool,
        root_in_place: bool,
        disguise: bool,
    ) -> tuple[Any, ...]:
        def shown(x: NDArray[Any] | None) -> Any:
            """Data that only moves may go as integers where MPI lacks its dtype."""
            return x.view(np.uint16) if x is not None and disguise and self.unknown_to_mpi and not case.reduces else x

        send: Any = shown(self._gives)
        got: Any = shown(recv)
        if case.method == "Barrier":
            return ()
        if case.method == "Bcast":
            return (got, ROOT)
        if case.counts == "send" and send is not None:
            send = [send, counts]
        if case.counts == "recv" and got is not None:
            got = [got, counts]
        if case.counts == "both":
            send, got = [send, counts], [got, [counts[self._rank]] * len(counts)]
        if moves_home:
            send = MPI.IN_PLACE
        if case.layout is _scatter and root_in_place:
            got, self._result = MPI.IN_PLACE, None
        if case.method == "Exscan" and got is None:  # rank 0 receives nothing, yet hands over a buffer
            got = np.empty_like(self._gives)
        told = [counts] if case.counts == "argument" else []
        return (send, got, *told, *([MPI.SUM] if case.reduces else []), *([ROOT] if case.rooted else []))

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments of the collective's method, in mpi4py's order."""
        return self._args

    def advance(self) -> None:
        """Give every element of the input a new value, as a program does between two calls."""
        shift = (self._shift + 1) % SHIFTS
        if self._gives is not None:
            if shift:
                self._gives += self._gives.dtype.type(1)
            else:
                self._gives -= self._gives.dtype.type(SHIFTS - 1)
        self._shift = shift
        if self._home is not None and self._gives is not None:
            np.copyto(self._home, self._gives)

    def poison(self) -> None:
        """Overwrite the place of the result, so that only this call can make it right."""
        if self._result is not None and not self._holds_input:
            self._result.fill(99)

    def wrong(self) -> int:
        """Number of wrong elements in the result of this rank."""
        if self._result is None or self._want is None:
            return 0
        want = self._want + self._want.dtype.type(self._shift * self._gain)
        return int(np.count_nonzero(self._result != want))
