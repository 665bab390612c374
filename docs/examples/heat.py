"""Heat equation on a square plate: rows are divided over the ranks, which exchange the rows at their borders.

du/dt = d2u/dx2 + d2u/dy2, by explicit steps: u += r (up + down + left + right - 4 u), stable for r up to 1/4. The upper
edge of the plate is kept at 1, the others at 0.

    mpiexec -n 3 python heat.py
"""

import numpy as np
from mpi4py import MPI

from collectives import Communicator

SIZE, RATIO = 40, 0.25


def rows_of(rank, ranks):
    """First and last + 1 inner row of a rank."""
    return SIZE * rank // ranks, SIZE * (rank + 1) // ranks


def advance(u):
    """One step of the inner points; returns the largest change."""
    change = RATIO * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1])
    u[1:-1, 1:-1] += change
    return abs(change).max()


def exchange_halo(comm, u):
    """Receive the rows next to this rank's block. At the edge of the plate MPI.PROC_NULL makes it no message."""
    up = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    down = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
    comm.Sendrecv(u[1], dest=up, recvbuf=u[-1], source=down)
    comm.Sendrecv(u[-2], dest=down, recvbuf=u[0], source=up)


def solve(comm, tolerance=1e-3):
    """Step until no point changes by more than the tolerance; returns this rank's rows and the number of steps."""
    if comm.size > SIZE:
        raise ValueError(f"expected at most {SIZE} ranks, a row for each; found {comm.size}")
    first, last = rows_of(comm.rank, comm.size)
    u = np.zeros((last - first + 2, SIZE + 2))  # with a row above and one below, and the left and right edges
    if first == 0:
        u[0] = 1.0
    steps, largest = 0, np.ones(1)
    while largest[0] > tolerance:
        exchange_halo(comm, u)
        largest[0] = advance(u)
        comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
        steps += 1
    return u[1:-1], steps


def main(comm):
    rows, steps = solve(comm)
    plate = comm.gather(rows)
    if comm.rank == 0:
        whole, alone = solve(Communicator(MPI.COMM_SELF))
        assert steps == alone
        np.testing.assert_array_equal(np.concatenate(plate), whole)  # the same bits on any number of ranks
        print(f"{steps} steps; {whole[SIZE // 2, SIZE // 2]:.4f} in the middle of the plate")


if __name__ == "__main__":
    main(Communicator(MPI.COMM_WORLD))
