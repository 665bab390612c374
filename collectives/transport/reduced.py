"""Reduction of one integer per rank.

mpi4py's lower-case reductions duplicate the communicator on first use, under a lock of the process: two threads that do
so on communicators of their own deadlock if ranks take the lock in different orders.
"""

import numpy as np
from mpi4py import MPI


def reduced(comm: MPI.Intracomm, number: int, op: MPI.Op = MPI.SUM) -> int:
    """Allreduce one integer per rank with `op` and return the result. Collective."""
    mine, result = np.array([number], np.int64), np.zeros(1, np.int64)
    comm.Allreduce(mine, result, op)
    return int(result[0])
