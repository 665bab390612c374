"""Time a distributed 3-D FFT, and its exchange by `Alltoallw` alone, on Chorus and on mpi4py, in turns with checks.

    mpiexec -n 2 python tests/studies/fft_race.py
    mpiexec -n 4 python tests/studies/fft_race.py --length 256

As mpi4py-fft does it: planes are transformed in two directions, all ranks exchange blocks described by subarray types,
and the third direction is transformed. Rows have the median of the slowest rank in microseconds on Chorus and on
mpi4py, and their ratio. The bound is the time of one copy of a rank's array by all ranks at once.
"""

import argparse
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.timing import Contestant, race
from collectives.schedule.chunks import even

Array = np.ndarray


class Slabs:
    """Complex array of length^3 elements, cut along axis 0 before the exchange, and along axis 1 after it."""

    def __init__(self, comm: MPI.Intracomm, length: int):
        self._comm, size, rank = comm, comm.Get_size(), comm.Get_rank()
        counts = list(even(length, size))
        starts = [sum(counts[:at]) for at in range(size)]
        self._mine = slice(starts[rank], starts[rank] + counts[rank])
        self.before = np.empty((counts[rank], length, length), complex)
        self.after = np.empty((length, counts[rank], length), complex)
        blocks = [
            [self._block(array.shape, axis, start, count) for start, count in zip(starts, counts)]
            for array, axis in ((self.before, 1), (self.after, 0))
        ]
        self._sides: list[Any] = [
            [array, ([1] * size, [0] * size), types] for array, types in zip((self.before, self.after), blocks)
        ]

    @staticmethod
    def _block(shape: tuple[int, ...], axis: int, start: int, count: int) -> MPI.Datatype:
        subsizes, starts = list(shape), [0, 0, 0]
        subsizes[axis], starts[axis] = count, start
        return MPI.DOUBLE_COMPLEX.Create_subarray(shape, subsizes, starts).Commit()

    def exchange(self) -> None:
        self._comm.Alltoallw(*self._sides)

    def part(self, whole: Array, axis: int) -> Array:
        """Elements of this rank of an array that is cut along an axis."""
        return whole[self._mine] if axis == 0 else whole[:, self._mine]


class Transform:
    """An FFT of new values in every turn, or its exchange alone."""

    def __init__(self, comm: MPI.Intracomm, length: int, whole: bool):
        self._slabs, self._whole, self._turn = Slabs(comm, length), whole, 0
        values = np.random.default_rng(1).standard_normal((length,) * 3).astype(complex)
        expected = np.fft.fftn(values) if whole else values
        self._values, self._expected = self._slabs.part(values, 0).copy(), self._slabs.part(expected, 1).copy()
        self.buffers, self.call = self, self._transform if whole else self._slabs.exchange
        self.advance()

    def advance(self) -> None:
        """Take the values times the number of the turn."""
        self._turn = self._turn % 3 + 1
        if self._whole:
            self._input = self._values * self._turn
        else:
            np.multiply(self._values, self._turn, out=self._slabs.before)

    def poison(self) -> None:
        self._slabs.after.fill(99)

    def _transform(self) -> None:
        self._slabs.before[:] = np.fft.fftn(self._input, axes=(1, 2))
        self._slabs.exchange()
        self._result = np.fft.fft(self._slabs.after, axis=0)

    def wrong(self) -> int:
        found = self._result if self._whole else self._slabs.after
        return int(not np.allclose(found, self._expected * self._turn, atol=1e-6 if self._whole else 0, rtol=1e-9))


class LocalCopies:
    """Copies of a rank's array, as the bound of an exchange."""

    def __init__(self, comm: MPI.Intracomm, length: int):
        slabs = Slabs(comm, length)
        self._source, self._target = slabs.before, np.empty_like(slabs.before)
        self._source.fill(1)
        self.buffers = self

    def advance(self) -> None:
        self._target[0] = 0

    poison = advance

    def call(self) -> None:
        np.copyto(self._target, self._source)

    def wrong(self) -> int:
        return int(not (self._target == 1).all())


def main() -> None:
    """Time the transform, the exchange and the bound; print a row of each on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=128, help="elements in each direction (default 128)")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each side of a row (default 5)")
    args = parser.parse_args()
    plain = MPI.COMM_WORLD
    comm = Communicator(plain)
    for name, whole in (("FFT", True), ("exchange", False)):
        sides: list[Any] = [Transform(one, args.length, whole) for one in (comm, plain)]
        bound: list[Any] = [] if whole else [LocalCopies(plain, args.length)]
        rows = [*sides, *bound]
        timings = race(plain, [Contestant("", one, one.call) for one in rows], seconds=args.seconds)
        if any(timing.wrong for timing in timings):
            raise RuntimeError(f"{name}: wrong results: {[timing.wrong for timing in timings]}")
        if comm.rank == 0:
            ours, native, *least = timings
            print(
                f"{name:9} Chorus {ours.median:9.1f}  mpi4py {native.median:9.1f}  {ours.median / native.median:5.2f}"
            )
            for one in least:
                print(f"{'bound':9} copies {one.median:9.1f}  of mpi4py's exchange {one.median / native.median:5.2f}")


if __name__ == "__main__":
    main()
