"""Ring allreduce: the sum of one vector per rank, on every rank, with the fewest bytes that any algorithm can send.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
Comput. 69 (2009), section 4.

Each rank cuts its vector into p chunks. In every round it sends one chunk to the right and receives one from the left.
First the reduce-scatter, here on 3 ranks; a1 is chunk a of rank 1, b02 = b0 + b2:

               rank 0          rank 1          rank 2
    start      a0  b0  c0      a1  b1  c1      a2  b2  c2
    round 1    sends c0        sends a1        sends b2
               a0  b02 c0      a1  b1  c01     a12 b2  c2
    round 2    sends b02       sends c01       sends a12
               a012            b012            c012            rank r has the sum of chunk r

Then the allgather: the complete chunks go round the ring, and each rank copies what it receives. Each half has p-1
rounds of n/p numbers, so a rank sends 2 (p-1)/p n numbers: almost independent of p.
"""

import numpy as np
from mpi4py import MPI


def exchange(comm, chunk, incoming):
    """Send to the right and receive from the left, both at once: blocking sends of all ranks would wait for ever."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    comm.Sendrecv(chunk, dest=right, recvbuf=incoming, source=left)


def reduce_scatter(comm, chunks):
    """Sum chunk r of all ranks into chunk r of rank r; the other chunks are left as partial sums."""
    for step in range(1, comm.size):
        outgoing, own = chunks[(comm.rank - step) % comm.size], chunks[(comm.rank - step - 1) % comm.size]
        incoming = np.empty_like(own)
        exchange(comm, outgoing, incoming)
        own += incoming


def allgather(comm, chunks):
    """Copy chunk r of rank r to all ranks."""
    for step in range(comm.size - 1):
        outgoing, own = chunks[(comm.rank - step) % comm.size], chunks[(comm.rank - step - 1) % comm.size]
        exchange(comm, outgoing, own)


def allreduce(comm, x):
    """Replace x by its sum over all ranks, in place."""
    chunks = np.array_split(x, comm.size)  # views; some are empty if x is shorter than p
    reduce_scatter(comm, chunks)
    allgather(comm, chunks)


def main(comm):
    for n in (0, 1, 10, 1000):
        x = np.arange(n) * (comm.rank + 1)
        allreduce(comm, x)
        np.testing.assert_array_equal(x, np.arange(n) * sum(range(1, comm.size + 1)))
    if comm.rank == 0:
        print(f"sums are exact; each rank sent {2 * (comm.size - 1) / comm.size:.2f} n numbers for a vector of n")


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
