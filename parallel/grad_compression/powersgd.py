"""PowerSGD low-rank gradient compression: factors P = M Q and Q = M' P are allreduced instead of the gradient M.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, algorithms 1 and 2.
"""

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.compressed import Motion
from parallel.data_parallel.grad_bucket import GradBucket
from parallel.nn.kernels import key_of


class _Matrix(NamedTuple):
    """Place of a gradient matrix in the bucket, and its two factors, views of the vectors that are summed."""

    name: str
    start: int
    rows: int
    columns: int
    left: np.ndarray
    right: np.ndarray

    def of(self, vector: np.ndarray) -> np.ndarray:
        """View of this matrix, of shape (rows, columns), in a vector as long as the bucket."""
        return vector[self.start : self.start + self.rows * self.columns].reshape(self.rows, self.columns)


class PowerSGD:
    """PowerSGD compressor: per step an allreduce of all left factors, then of all right ones, of `rank` columns each.

    A tensor is a matrix of its first axis by all others. It is summed uncompressed, with the left factors, if two
    factors are not smaller. `seed` determines the first right factors.
    """

    feedback = True

    def __init__(self, comm: Communicator, bucket: GradBucket, rank: int, seed: int):
        self._comm = comm
        shapes, self._uncompressed, at = [], list[tuple[slice, slice]](), 0
        for place in bucket.places:
            rows = place.parameter.shape[0] if place.parameter.shape else 1
            columns = place.size // rows if rows else 0
            start = place.span.start - bucket.span.start
            if rank * (rows + columns) < place.size:
                shapes.append((place.parameter.name, start, rows, columns))
            else:
                self._uncompressed.append((slice(start, start + place.size), slice(at, at + place.size)))
                at += place.size
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
        """As `Compressor.exchange`; the residual is this rank's gradient less the approximate sum / number of ranks."""
        before = self._rights.copy()
        np.copyto(lost, x)
        for there, here in self._uncompressed:
            self._lefts[here] = x[there]
        for matrix in self._matrices:
            np.matmul(matrix.of(x), matrix.right, out=matrix.left)
        yield [self._comm.Iallreduce(MPI.IN_PLACE, self._lefts)]
        for matrix in self._matrices:
            matrix.left[...] = np.linalg.qr(matrix.left)[0]
            np.matmul(matrix.of(x).T, matrix.left, out=matrix.right)
        yield [self._comm.Iallreduce(MPI.IN_PLACE, self._rights)]
        out[...] = 0
        for matrix in self._matrices:
            np.matmul(matrix.left, matrix.right.T, out=matrix.of(out))
            mine = matrix.of(lost)
            mine -= matrix.of(out) / np.float32(self._comm.Get_size())
        for there, here in self._uncompressed:
            out[there] = self._lefts[here]
            lost[there] = 0
        if not np.isfinite(self._rights).all():  # equal on all ranks, so all keep the previous factors
            self._rights[...] = before

    def state(self) -> dict[str, np.ndarray]:
        """Right factors by name, from which the next step's power iteration starts."""
        return {f"powersgd/{matrix.name}": matrix.right for matrix in self._matrices}

    def close(self) -> None: ...
