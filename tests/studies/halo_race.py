"""Time the exchange of a 2-D halo by `Neighbor_alltoall`, on Chorus and on mpi4py, in turns with checks.

    mpiexec -n 2 python tests/studies/halo_race.py
    mpiexec -n 4 python tests/studies/halo_race.py --sizes 1K,64K

Ranks form a periodic grid, in which each has four neighbours; on few ranks some of these are one rank, or itself. Rows
have the median of the slowest rank in microseconds on Chorus and on mpi4py, and their ratio.
"""

import argparse
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.size_arguments import parse_sizes
from collectives.benchmark.timing import Contestant, race


class Halo:
    """Edges of a rank's part of a grid, and the halo that it receives: a row of `nbytes` for each neighbour."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int):
        self._grid = comm.Create_cart(MPI.Compute_dims(comm.Get_size(), 2), periods=[True, True])
        self._turn = 0
        self._edges, self._halo = np.empty((4, nbytes // 8)), np.empty((4, nbytes // 8))
        # an edge that leaves in one direction arrives from the opposite one
        self._from = [self._grid.inedges[at] * 4 + (at ^ 1) for at in range(4)]
        self.buffers = self

    def advance(self) -> None:
        self._turn += 1
        self._edges[:] = np.arange(4)[:, None] + 4 * self._grid.Get_rank() + 100 * self._turn

    def poison(self) -> None:
        self._halo.fill(-1)

    def call(self) -> None:
        self._grid.Neighbor_alltoall(self._edges, self._halo)

    def wrong(self) -> int:
        return int(np.count_nonzero(self._halo != np.array(self._from)[:, None] + 100 * self._turn))


def main() -> None:
    """Time the exchange for all sizes; print a row of each on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=parse_sizes, default="1K,64K", metavar="LIST", help="bytes for each neighbour")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each side of a row (default 3)")
    args = parser.parse_args()
    plain = MPI.COMM_WORLD
    comm = Communicator(plain)
    for nbytes in args.sizes:
        sides: list[Any] = [Halo(one, nbytes) for one in (comm, plain)]
        timings = race(plain, [Contestant("", one, one.call) for one in sides], seconds=args.seconds)
        if any(timing.wrong for timing in timings):
            raise RuntimeError(f"{nbytes} bytes: wrong results: {[timing.wrong for timing in timings]}")
        if comm.rank == 0:
            ours, native = (timing.median for timing in timings)
            print(f"{nbytes:7} bytes  Chorus {ours:8.1f}  mpi4py {native:8.1f}  {ours / native:5.2f}", flush=True)


if __name__ == "__main__":
    main()
