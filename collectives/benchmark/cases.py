"""Benchmark cases: buffers, arguments and closed-form result of one call of each collective.

Element j of rank r's input is ``(j + 3 r) mod M + s``: a small integer, so that any sum is exact (of integers modulo
2**bits). Where a float type cannot hold the sum over all ranks, the input of most of them is zero. The shift s takes
three values and changes before every call, so neither stale data nor the results of another contestant can pass.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

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


MEMORIES = ("plain", "symmetric")
"""Memory of a program's arrays: NumPy's, or from `Communicator.empty` (collective)."""


def even_form(collective: str) -> str:
    """Name of the collective without the v: ``allgatherv`` gives ``allgather``. Both share their algorithms."""
    return collective.removesuffix("v")


class Pattern(NamedTuple):
    """Test pattern: its period `modulus`, and the distance `stride` of the ranks whose inputs are not zero."""

    modulus: int
    stride: int

    def nonzero(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank % self.stride == 0]

    def total(self, ranks: Sequence[int], start: int, stop: int) -> NDArray[np.int32]:
        """Elements `start` to `stop` of the summed test inputs of `ranks`, with shift 0."""
        one, shifts = np.arange(start, start + self.modulus), 3 * np.array(self.nonzero(ranks), int)
        period = ((one[:, None] + shifts) % self.modulus).sum(axis=1)
        return np.resize(period.astype(np.int32), stop - start)


def exact_pattern(size: int, dtype: np.dtype[Any]) -> Pattern:
    """Pattern with the most nonzero inputs, then the largest period, whose sum over `size` ranks `dtype` holds exactly.

    Sums of integers may wrap around, if no period is short enough.
    """
    exact = EXACT.get(dtype.name, 2**20)
    stride = 1 if dtype.kind in "iu" else max(1, -(-size * (SHIFTS - 1) // exact))
    summed = -(-size // stride)
    return Pattern(max(1, min(MODULUS, exact // summed - (SHIFTS - 1) + 1)), stride)


class BenchmarkCase(NamedTuple):
    """One collective to benchmark: name of its method, input and output blocks, and form of its arguments."""

    method: str
    meaning: Meaning
    counts: str = ""  # where a v-form has its counts: with "send", "recv", "both", or an "argument" of their own
    home: str = ""  # in place, the input lies in the receive buffer: in "whole" or in the own "block"

    @property
    def equal(self) -> bool:
        """True if all blocks must have the same length, so that the element count is a multiple of the ranks."""
        return not self.meaning.vector and not self.counts

    def sends(self, pattern: Pattern, rank: int, at: list[int]) -> NDArray[np.int32] | None:
        """Test input of a rank, or None if it sends nothing. Block b has elements ``at[b]`` to ``at[b + 1]``."""
        size = len(at) - 1
        blocks = [block % size for block in self.meaning.before(rank, size, ROOT, size)]
        return np.concatenate([pattern.total([rank], at[b], at[b + 1]) for b in blocks]) if blocks else None

    def receives(self, pattern: Pattern, rank: int, at: list[int]) -> tuple[NDArray[np.int32] | None, int]:
        """Expected result of a rank (None if it receives nothing), and the nonzero inputs summed in each element."""
        size = len(at) - 1
        sums = [(b % size, list(ranks)) for b, ranks in self.meaning.after(rank, size, ROOT, size).items()]
        if not sums:
            return None, 0
        result = np.concatenate([pattern.total(ranks, at[b], at[b + 1]) for b, ranks in sums])
        return result, len(pattern.nonzero(sums[0][1]))


CASES: dict[str, BenchmarkCase] = {
    name: BenchmarkCase(method, MEANINGS[even_form(name)], counts, home)
    for name, method, counts, home in (
        ("broadcast", "Bcast", "", ""),
        ("reduce", "Reduce", "", "whole"),
        ("scatter", "Scatter", "", ""),
        ("gather", "Gather", "", "block"),
        ("allgather", "Allgather", "", "block"),
        ("reduce_scatter", "Reduce_scatter_block", "", "whole"),
        ("allreduce", "Allreduce", "", "whole"),
        ("barrier", "Barrier", "", ""),
        ("alltoall", "Alltoall", "", "whole"),
        ("scan", "Scan", "", "whole"),
        ("exscan", "Exscan", "", "whole"),
        ("scatterv", "Scatterv", "send", ""),
        ("gatherv", "Gatherv", "recv", "block"),
        ("allgatherv", "Allgatherv", "recv", "block"),
        ("reduce_scatterv", "Reduce_scatter", "argument", "whole"),
        ("alltoallv", "Alltoallv", "both", ""),
    )
}


def elements(case: BenchmarkCase, nbytes: int, itemsize: int, size: int) -> int:
    """Element count for `nbytes`, rounded up to whole elements and, where needed, equal blocks. 0 for a barrier."""
    unit = itemsize * size if case.equal else itemsize
    return 0 if case.meaning.synchronises else -(-nbytes // unit) * (unit // itemsize)


class CaseBuffers:
    """Send and receive arrays of one rank for one benchmark case, their test data, and the arguments of the call.

    `n` counts the elements of all blocks together. Creation is collective for symmetric memory. Collectives that do not
    reduce get float16 and bfloat16 as uint16, since MPI may lack these types.
    """

    def __init__(
        self,
        case: BenchmarkCase,
        comm: Any,
        n: int,
        dtype: np.dtype[Any],
        memory: str = "plain",
        in_place: bool = False,
    ) -> None:
        rank, size = comm.Get_rank(), comm.Get_size()
        counts = list(even(n, size))
        starts = [0, *accumulate(counts)]
        pattern = exact_pattern(size if case.meaning.reduces else 1, dtype)
        gives, (gets, self._gain) = case.sends(pattern, rank, starts), case.receives(pattern, rank, starts)
        self.case, self._shift, self._changes = case, 0, bool(pattern.nonzero([rank]))

        def array(values: NDArray[np.int32] | None, length: int = 0) -> NDArray[Any] | None:
            """Allocate an array that begins with `values`. None if they are None. Collective for symmetric memory."""
            length = 0 if values is None else length or len(values)
            symmetric = memory == "symmetric"
            made = comm.empty(comm.allreduce(length, MPI.MAX), dtype)[:length] if symmetric else np.empty(length, dtype)
            if values is None:
                return None
            made[: len(values)] = values
            return made

        self._want = None if gets is None else gets.astype(dtype)
        moves_home = bool(in_place and case.home and gets is not None)
        stays = in_place and rank == ROOT and case.method.startswith("Scatter")
        recv = array(gets, n if moves_home and case.home == "whole" else 0)
        self._gives = array(gives) if case.method != "Bcast" else recv if rank == ROOT else None
        self._home: NDArray[Any] | None = None
        if moves_home and recv is not None:
            self._home = recv if case.home == "whole" else recv[starts[rank] : starts[rank + 1]]
        self._result = None if recv is None or self._want is None or stays else recv[: len(self._want)]
        self._holds_input = self._home is not None or (case.method == "Bcast" and rank == ROOT)

        hidden = dtype.name in ("float16", "bfloat16") and not case.meaning.reduces
        send, got = (x.view(np.uint16) if x is not None and hidden else x for x in (self._gives, recv))
        if case.method == "Exscan" and got is None:  # rank 0 receives nothing, yet hands over a buffer
            got = np.empty_like(send)
        sent: Any = MPI.IN_PLACE if self._home is not None else send
        if sent is send is not None and case.counts in ("send", "both"):
            sent = [send, counts]
        received: Any = MPI.IN_PLACE if stays else got
        if got is not None and case.counts in ("recv", "both"):
            received = [got, counts if case.counts == "recv" else [counts[rank]] * size]
        options = (counts, case.counts == "argument"), (MPI.SUM, case.meaning.reduces), (ROOT, case.meaning.rooted)
        arrays = {"Barrier": (), "Bcast": (received,)}.get(case.method, (sent, received))
        # Positional arguments of the collective's method, in mpi4py's order.
        self.args = (*arrays, *(value for value, wanted in options if wanted))

    def advance(self) -> None:
        """Change every element of the input, as a program does between two calls. If in place, in the buffer too.

        Inputs that are zero remain so.
        """
        shift = (self._shift + 1) % SHIFTS
        if self._gives is not None and self._changes:
            if shift:
                self._gives += self._gives.dtype.type(1)
            else:
                self._gives -= self._gives.dtype.type(SHIFTS - 1)
        self._shift = shift
        if self._home is not None and self._gives is not None:
            np.copyto(self._home, self._gives)

    def poison(self) -> None:
        """Overwrite the result array, unless it holds the input, so that only the next call can make it right."""
        if self._result is not None and not self._holds_input:
            self._result.fill(99)

    def wrong(self) -> int:
        if self._result is None or self._want is None:
            return 0
        want = self._want + np.array(self._shift * self._gain).astype(self._want.dtype)  # integers wrap around
        return int(np.count_nonzero(self._result != want))
