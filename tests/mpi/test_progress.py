"""A rank that waits in a collective helps MPI along with what it was given before: others may hang on that."""

import numpy as np
import pytest
from mpi4py import MPI


@pytest.mark.parametrize("form", ["Allreduce", "Barrier", "Bcast"])
def test_a_send_goes_on_while_its_rank_is_in_a_collective(comm, form):
    """The receiver comes to the collective only when all messages, more than MPI can buffer, are there."""
    size, rank = comm.Get_size(), comm.Get_rank()
    if size == 1:
        pytest.skip("nobody to send to")
    message, total = np.full(1000, rank + 1.0), np.zeros(3)
    if rank == 0:
        requests = [comm.Isend(message, 1) for _ in range(3000)]
    elif rank == 1:
        for _ in range(3000):
            message[-1] = 0
            MPI.Intracomm(comm).Recv(message, 0)
            assert message[-1] == 1
    if form == "Allreduce":
        comm.Allreduce(np.ones(3), total)
    elif form == "Bcast":
        comm.Bcast(total, size - 1)
    else:
        comm.Barrier()
    if rank == 0:
        MPI.Request.Waitall(requests)
