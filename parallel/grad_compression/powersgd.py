"""Matrices of low rank: P = M Q and Q = M' P are summed in place of M, one step of the power method for every step
of the training (Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, algorithms 1 and 2)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.compressed import Motion
from parallel.data_parallel.grad_bucket import GradBucket
from parallel.nn.kernels.philox import key_of


class _Matrix(NamedTuple):
    """Slices of a tensor, seen as a matrix, in the bucket, and of its two factors in the summed vectors."""

    name: str
    start: int
    rows: int
    columns: int
    left: np.ndarray
    right: np.ndarray

    def of(self, vector: np.ndarray) -> np.ndarray:
        """The tensor's part of a vector."""
        return vector[self.start : self.start + self.rows * self.columns].reshape(self.rows, self.columns)


class PowerSGD:
    """Two allreduces, of all left and of all right factors; what is no matrix travels whole with the first.

    Parameters
    ----------
    comm : Communicator
    bucket : GradBucket
        A tensor counts as a matrix of its first axis times all others, if two factors are smaller than it is.
    rank : int
        Columns of each factor.
    seed : int
        Of the first right factors.
    """

    feedback = True

    def __init__(self, comm: Communicator, bucket: GradBucket, rank: int, seed: int):
        self.comm = comm
        shapes, rest, at = [], [], 0
        for place in bucket.places:
            rows = place.parameter.shape[0] if place.parameter.shape else 1
            columns = place.size // rows if rows else 0
            start = place.span.start - bucket.span.start
            if rank * (rows + columns) < place.size:
                shapes.append((place.parameter.name, start, rows, columns))
            else:
                rest.append((slice(start, start + place.size), slice(at, at + place.size)))
                at += place.size
        self._rest = rest
        self._lefts = comm.zeros(at + rank * sum(rows for _, _, rows, _ in shapes), np.float32)
        self._rights = comm.zeros(rank * sum(columns for *_, columns in shapes), np.float32)
        self._matrices, right = [], 0
        for name, start, rows, columns in shapes:
            p = self._lefts[at : at + rows * rank].reshape(rows, rank)
            q = self._rights[right : right + columns * rank].reshape(columns, rank)
            key = key_of(seed, 0, f"powersgd/{name}")
            q[...] = np.random.Generator(np.random.Philox(key=key)).standard_normal(q.shape, np.float32)
            self._matrices.append(_Matrix(name, start, rows, columns, p, q))
            at, right = at + rows * rank, right + columns * rank

    def exchange(self, x: np.ndarray, out: np.ndarray, lost: np.ndarray, step: int) -> Motion:
        """As `parallel.grad_compression.Compressor`. What is lost is this rank's matrix less its share of the sum's."""
        before = self._rights.copy()
        np.copyto(lost, x)
        for there, here in self._rest:
            self._lefts[here] = x[there]
        for matrix in self._matrices:
            np.matmul(matrix.of(x), matrix.right, out=matrix.left)
        yield [self.comm.Iallreduce(MPI.IN_PLACE, self._lefts)]
        for matrix in self._matrices:
            matrix.left[...] = np.linalg.qr(matrix.left)[0]
            np.matmul(matrix.of(x).T, matrix.left, out=matrix.right)
        yield [self.comm.Iallreduce(MPI.IN_PLACE, self._rights)]
        out[...] = 0
        for matrix in self._matrices:
            np.matmul(matrix.left, matrix.right.T, out=matrix.of(out))
            mine = matrix.of(lost)
            mine -= matrix.of(out) / np.float32(self.comm.Get_size())
        for there, here in self._rest:
            out[there] = self._lefts[here]
            lost[there] = 0
        if not np.isfinite(self._rights).all():  # on all ranks alike
            self._rights[...] = before

    def state(self) -> dict[str, np.ndarray]:
        """The right factors, from which the next step's power method goes on."""
        return {f"powersgd/{matrix.name}": matrix.right for matrix in self._matrices}

    def close(self) -> None:
        """Nothing is kept."""
