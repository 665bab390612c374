"""Tensor-parallel MLP: two matrices cut over the ranks, one allreduce in the forward and one in the backward pass.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019, sec. 3.

The MLP is z = relu(x A) B. A is cut by columns and B by rows; rank r has A_r and B_r:

    x A = x [A_0 A_1 ...] = [x A_0, x A_1, ...]       rank r has some columns of the hidden layer. relu acts on single
                                                      numbers, so the rank applies it without any message
    z   = sum over r of relu(x A_r) B_r               needs an allreduce

x and z are whole and equal on all ranks. The paper writes the messages as two functions, one the mirror of the other:

          forward                   backward
    f     x -> x                    dx -> sum of dx over the ranks (each has the gradient through its own columns)
    g     z -> sum of z over ranks  dz -> dz

So the parallel layer is the plain one between f and g. A_r, B_r and their gradients never leave their rank.
"""

import numpy as np
from mpi4py import MPI

from collectives import Communicator


class F:
    """Identity in the forward pass, allreduce in the backward pass."""

    def __init__(self, comm):
        self.comm = comm

    def forward(self, x):
        return x

    def backward(self, dx):
        total = np.empty_like(dx)
        self.comm.Allreduce(dx, total)
        return total


class G:
    """Allreduce in the forward pass, identity in the backward pass."""

    def __init__(self, comm):
        self.comm = comm

    def forward(self, z):
        total = np.empty_like(z)
        self.comm.Allreduce(z, total)
        return total

    def backward(self, dz):
        return dz


class ParallelMLP:
    """z = relu(x A) B with this rank's columns of A and rows of B."""

    def __init__(self, a, b, comm):
        hidden = np.array_split(np.arange(a.shape[1]), comm.size)[comm.rank]
        self.a, self.b, self.f, self.g = a[:, hidden], b[hidden], F(comm), G(comm)

    def forward(self, x):
        x = self.f.forward(x)
        h = np.maximum(x @ self.a, 0)
        return self.g.forward(h @ self.b), (x, h)

    def backward(self, dz, saved):
        """Gradients with respect to x, A_r and B_r."""
        x, h = saved
        dz = self.g.backward(dz)
        dh = dz @ self.b.T * (h > 0)
        return self.f.backward(dh @ self.a.T), x.T @ dh, h.T @ dz


def main(comm):
    random = np.random.default_rng(0)  # the same numbers on all ranks
    a, b = random.normal(size=(6, 14)), random.normal(size=(14, 6))
    x, dz = random.normal(size=(2, 5, 6))
    layer = ParallelMLP(a, b, comm)
    z, saved = layer.forward(x)
    dx, da, db = layer.backward(dz, saved)

    h = np.maximum(x @ a, 0)  # the whole layer
    dh = dz @ b.T * (h > 0)
    hidden = np.array_split(np.arange(14), comm.size)[comm.rank]
    for found, expected in (z, h @ b), (dx, dh @ a.T), (da, (x.T @ dh)[:, hidden]), (db, (h.T @ dz)[hidden]):
        np.testing.assert_allclose(found, expected, atol=1e-12)
    if comm.rank == 0:
        print(f"output and gradients are those of the whole layer; rank 0 has {da.size + db.size} weights of 168")


if __name__ == "__main__":
    main(Communicator(MPI.COMM_WORLD))
