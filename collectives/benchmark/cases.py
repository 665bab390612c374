"""Benchmark cases: buffers, arguments and closed-form result of one call of each collective.

Element j of rank r's input is ``(j + 3 r) mod M + s``: a small integer, so that any sum is exact.
The shift s takes three values and changes before every call, so neither stale data nor the results of another
contestant can pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.schedule.chunks import even
from collectives.schedule.semantics import MEANINGS, Meaning

NUMPY_DTYPES = ["float32", "float64", "float16", "int8", "uint8", "int16", "int32", "int64", "complex64", "complex128"]
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in NUMPY_DTYPES}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)

# Largest integer that each dtype holds exactly, where it is less than the pattern could ever need.
EXACT = {"float16": 2048, "bfloat16": 256, "int8": 127, "uint8": 255, "int16": 32767}
MODULUS, SHIFTS, ROOT = 31, 3, 0


def _plain(comm: MPI.Intracomm, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.empty(count, dtype)


def _symmetric(comm: Any, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The shape must be the same on all ranks, so that of the longest array is taken. Collective."""
    array: np.ndarray = comm.empty(comm.allreduce(count, MPI.MAX), dtype)[:count]
    return array


MEMORIES: dict[str, Callable[[MPI.Intracomm, int, np.dtype[Any]], NDArray[Any]]] = {
    "plain": _plain,
    "symmetric": _symmetric,
}
"""Allocation of a program's arrays: NumPy, or `Communicator.empty`, which is collective."""


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


def _all(size: int) -> float:
    return 1.0


def _others(size: int) -> float:
    return (size - 1) / size


def _twice(size: int) -> float:
    return 2 * (size - 1) / size


@dataclass(frozen=True)
class BenchmarkCase:
    """One collective: its method, busbw as a multiple of algbw, its meaning, and the form of its arguments."""

    method: str
    factor: Callable[[int], float]
    meaning: Meaning
    equal: bool = False  # every rank's block has the same length, so the total is a multiple of the ranks
    counts: str = ""  # where a v-form has its counts: with "send", "recv", "both", or an "argument" of their own
    home: str = ""  # in place, the input lies in the receive buffer: in "whole" or in the own "block"

    def sends(self, p: DataPattern, rank: int, at: list[int]) -> NDArray[np.int32] | None:
        """Input of a rank, whose blocks begin `at` these elements; None if it has none."""
        blocks = [block % p.size for block in self.meaning.before(rank, p.size, ROOT, p.size)]
        return np.concatenate([p.input(rank, at[b], at[b + 1]) for b in blocks]) if blocks else None

    def receives(self, p: DataPattern, rank: int, at: list[int]) -> tuple[NDArray[np.int32] | None, int]:
        """Result of a rank, None if it has none, and the number of inputs in each sum."""
        sums = [(b % p.size, list(ranks)) for b, ranks in self.meaning.after(rank, p.size, ROOT, p.size).items()]
        if not sums:
            return None, 0
        return np.concatenate([p.total(ranks, at[b], at[b + 1]) for b, ranks in sums]), len(sums[0][1])


CASES: dict[str, BenchmarkCase] = {
    "broadcast": BenchmarkCase("Bcast", _all, MEANINGS["broadcast"]),
    "reduce": BenchmarkCase("Reduce", _all, MEANINGS["reduce"], home="whole"),
    "scatter": BenchmarkCase("Scatter", _others, MEANINGS["scatter"], equal=True),
    "gather": BenchmarkCase("Gather", _others, MEANINGS["gather"], equal=True, home="block"),
    "allgather": BenchmarkCase("Allgather", _others, MEANINGS["allgather"], equal=True, home="block"),
    "reduce_scatter": BenchmarkCase(
        "Reduce_scatter_block", _others, MEANINGS["reduce_scatter"], equal=True, home="whole"
    ),
    "allreduce": BenchmarkCase("Allreduce", _twice, MEANINGS["allreduce"], home="whole"),
    "barrier": BenchmarkCase("Barrier", _all, MEANINGS["barrier"]),
    "alltoall": BenchmarkCase("Alltoall", _others, MEANINGS["alltoall"], equal=True, home="whole"),
    "scan": BenchmarkCase("Scan", _all, MEANINGS["scan"], home="whole"),
    "exscan": BenchmarkCase("Exscan", _all, MEANINGS["exscan"], home="whole"),
    "scatterv": BenchmarkCase("Scatterv", _others, MEANINGS["scatter"], counts="send"),
    "gatherv": BenchmarkCase("Gatherv", _others, MEANINGS["gather"], counts="recv", home="block"),
    "allgatherv": BenchmarkCase("Allgatherv", _others, MEANINGS["allgather"], counts="recv", home="block"),
    "reduce_scatterv": BenchmarkCase(
        "Reduce_scatter", _others, MEANINGS["reduce_scatter"], counts="argument", home="whole"
    ),
    "alltoallv": BenchmarkCase("Alltoallv", _others, MEANINGS["alltoall"], counts="both"),
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
        self.case = case
        self.unknown_to_mpi = dtype.name in ("float16", "bfloat16")
        rank, size = comm.Get_rank(), comm.Get_size()
        counts = list(even(n, size))
        starts = [0, *accumulate(counts)]
        pattern = DataPattern.fitting(size, dtype)
        gives, (gets, self._gain) = case.sends(pattern, rank, starts), case.receives(pattern, rank, starts)
        self._rank, self._shift = rank, 0

        def array(values: NDArray[np.int32] | None, count: int | None = None) -> NDArray[Any] | None:
            """Collective for symmetric memory: all ranks make their arrays, empty ones too."""
            length = 0 if values is None else len(values) if count is None else count
            made = MEMORIES[memory](comm, length, dtype)
            if values is None:
                return None
            made[: len(values)] = values
            return made

        self._want = None if gets is None else gets.astype(dtype)
        moves_home = bool(in_place and case.home and gets is not None)
        recv = array(gets, n if moves_home and case.home == "whole" else None)
        self._gives = array(gives) if case.method != "Bcast" else recv if rank == ROOT else None
        self._home: NDArray[Any] | None = None
        if moves_home and recv is not None:
            self._home = recv if case.home == "whole" else recv[starts[rank] : starts[rank + 1]]
        self._result = None if recv is None or self._want is None else recv[: len(self._want)]
        if in_place and rank == ROOT and case.method.startswith("Scatter"):
            self._result = None
        self._holds_input = self._home is not None or (case.method == "Bcast" and rank == ROOT)
        # Positional arguments of the collective's method, in mpi4py's order.
        self.args = self._arguments(recv, counts, in_place, disguise)

    def _arguments(
        self, recv: NDArray[Any] | None, counts: list[int], in_place: bool, disguise: bool
    ) -> tuple[Any, ...]:
        case = self.case

        def shown(x: NDArray[Any] | None) -> Any:
            """Data that only moves may go as integers where MPI lacks its dtype."""
            hidden = disguise and self.unknown_to_mpi and not case.meaning.reduces
            return x.view(np.uint16) if x is not None and hidden else x

        send, got = shown(self._gives), shown(recv)
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
        if self._home is not None:
            send = MPI.IN_PLACE
        if in_place and self._rank == ROOT and case.method.startswith("Scatter"):
            got = MPI.IN_PLACE
        if case.method == "Exscan" and got is None:  # rank 0 receives nothing, yet hands over a buffer
            got = np.empty_like(self._gives)
        options = (counts, case.counts == "argument"), (MPI.SUM, case.meaning.reduces), (ROOT, case.meaning.rooted)
        return (send, got, *(value for value, wanted in options if wanted))

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
