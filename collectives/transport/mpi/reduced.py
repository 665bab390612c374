"""Reduction, and collection, of integers of every rank.

mpi4py's lower-case reductions duplicate the communicator on first use, under a lock of the process: two threads that do
so on communicators of their own deadlock if ranks take the lock in different orders.
"""

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI


def reduced(comm: MPI.Intracomm, number: int, op: MPI.Op = MPI.SUM) -> int:
    """Allreduce one integer per rank with `op` and return the result. Collective."""
    mine, result = np.array([number], np.int64), np.zeros(1, np.int64)
    comm.Allreduce(mine, result, op)
    return int(result[0])


def gathered(comm: MPI.Intracomm, number: int) -> list[int]:
    """Allgather one integer per rank. Collective."""
    return [first for (first,) in gathered_rows(comm, (number,))]


def gathered_rows(comm: MPI.Intracomm, numbers: Sequence[int]) -> list[list[int]]:
    """Allgather as many integers of every rank, by rank. Collective."""
    rows = np.empty((comm.Get_size(), len(numbers)), np.int64)
    comm.Allgather(np.array(numbers, np.int64), rows)
    return rows.tolist()
