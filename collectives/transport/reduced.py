"""One integer of every rank, combined.

mpi4py's lower-case reductions duplicate the communicator when they are first used on it, under a lock of the process:
two threads that do so on communicators of their own wait for each other where ranks take the lock in another order.
"""

import numpy as np
from mpi4py import MPI


def reduced(comm: MPI.Intracomm, number: int, op: MPI.Op = MPI.SUM) -> int:
    """Combine a number of every rank. Collective."""
    mine, found = np.array([number], np.int64), np.zeros(1, np.int64)
    comm.Allreduce(mine, found, op)
    return int(found[0])
