"""K-means of points that are divided over the ranks, with one allreduce in each iteration.

Each iteration moves a centre to the mean of the points that are nearest to it. (Lloyd, "Least squares quantization in
PCM", IEEE Trans. Inf. Theory 28, 1982.) Only sums and numbers of points leave a rank:

    mpiexec -n 3 python kmeans.py
"""

import numpy as np
from mpi4py import MPI

from collectives import Communicator


def kmeans(comm, points, centres, iterations=100):
    """Centres (k, d) after convergence and each of this rank's points' cluster; all ranks begin with equal centres."""
    for _ in range(iterations):
        distances = ((points[:, None] - centres) ** 2).sum(axis=2)
        cluster = distances.argmin(axis=1)
        sums = np.zeros((len(centres), points.shape[1] + 1))  # sum of the points of each cluster, and their number
        np.add.at(sums[:, :-1], cluster, points)
        np.add.at(sums[:, -1], cluster, 1)
        comm.Allreduce(MPI.IN_PLACE, sums)
        count = sums[:, -1:]
        moved = np.where(count > 0, sums[:, :-1] / np.maximum(count, 1), centres)  # an empty cluster stays
        if np.array_equal(moved, centres):  # on all ranks in the same iteration
            break
        centres = moved
    return centres, cluster


def main(comm):
    random = np.random.default_rng(0)
    true = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 4.0]])
    points = random.permutation(np.concatenate([c + random.normal(0, 0.5, (250, 2)) for c in true]))
    centres, _ = kmeans(comm, points[comm.rank :: comm.size], true + 1)
    alone, _ = kmeans(Communicator(MPI.COMM_SELF), points, true + 1)
    np.testing.assert_allclose(centres, alone)
    np.testing.assert_allclose(centres, true, atol=0.1)
    if comm.rank == 0:
        print("centres", *(f"({x:.2f}, {y:.2f})" for x, y in centres))


if __name__ == "__main__":
    main(Communicator(MPI.COMM_WORLD))
