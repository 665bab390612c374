"""PowerSGD low-rank gradient compression: factors P = M Q and Q = M' P are allreduced instead of the gradient M.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, algorithms 1 and 2.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.compressed import Motion
from collectives.compressed.bound_collective import module_of
from parallel.engine.data_parallel.grad_bucket import GradBucket
from parallel.nn.kernels import key_of
from quant.kernels import array_namespace
from quant.types import Array


class _Matrix(NamedTuple):
    """Place of a gradient matrix in the bucket, and its two factors, views of the vectors that are summed."""

    name: str
    start: int
    rows: int
    columns: int
    left: Array
    right: Array

    def of(self, vector: Array) -> Array:
        """View of this matrix, of shape (rows, columns), in a vector as long as the bucket."""
        return vector[self.start : self.start + self.rows * self.columns].reshape(self.rows, self.columns)


def orthonormalize(matrices: Sequence[Array]) -> None:
    """Replace tall matrices with as many columns each by Q of their QR factorisations. Zeros give unit vectors."""
    if all(isinstance(matrix, np.ndarray) for matrix in matrices):
        for matrix in matrices:
            matrix[...] = np.linalg.qr(matrix)[0]
        return
    xp, columns = array_namespace(matrices[0]), matrices[0].shape[1]
    stack = xp.zeros((len(matrices), max(map(len, matrices)), columns), np.float64)  # rows of 0 change no factor
    for matrix, into in zip(matrices, stack):
        into[: len(matrix)] = matrix
    for matrix, found in zip(matrices, reflected(stack)):
        matrix[...] = found[: len(matrix)]


def reflected(stack: Array) -> Array:
    """Q of stacked tall matrices of few columns, float64, by Householder reflections as LAPACK's. Changes `stack`.

    For a GPU: all matrices in the same kernels, and without a wait of the host.
    """
    xp, q, reflectors = array_namespace(stack), array_namespace(stack).zeros(stack.shape, stack.dtype), []
    for k in range(stack.shape[2]):
        q[:, k, k] = 1
        v, rest = stack[:, k:, k : k + 1].copy(), stack[:, k:, k:]
        head = v[:, :1]
        head += xp.copysign(xp.sqrt((v * v).sum(axis=1, keepdims=True)), head)
        square = (v * v).sum(axis=1, keepdims=True)
        scaled = v * (2 / xp.where(square == 0, 1.0, square))
        reflectors.append((v, scaled))
        rest -= scaled * (v * rest).sum(axis=1, keepdims=True)
    for k, (v, scaled) in reversed([*enumerate(reflectors)]):
        rest = q[:, k:, k:]
        rest -= scaled * (v * rest).sum(axis=1, keepdims=True)
    return q


class PowerSGD:
    """PowerSGD compressor: per step an allreduce of all left factors, then of all right ones, of `rank` columns each.

    A tensor is a matrix of its first axis by all others. It is summed uncompressed, with the left factors, if two
    factors are not smaller. `seed` determines the first right factors.
    """

    feedback = True

    def __init__(self, comm: Communicator, bucket: GradBucket, rank: int, seed: int, like: Any = None):
        self._comm = comm
        shapes, self._uncompressed, at = [], list[tuple[slice, slice]](), 0
        for place in bucket.places:
            rows = place.parameter.shape[0] if place.parameter.shape else 1
            columns = place.size // rows if rows else 0
            start = place.span.start - bucket.span.start
            if rank * (rows + columns) < place.size:  # else the factors are no smaller
                shapes.append((place.parameter.label, start, rows, columns))
            else:
                self._uncompressed.append((slice(start, start + place.size), slice(at, at + place.size)))
                at += place.size
        self._lefts = comm.empty(at + rank * sum(rows for _, _, rows, _ in shapes), np.float32, like)
        self._rights = comm.empty(rank * sum(columns for *_, columns in shapes), np.float32, like)
        self._lefts[...] = 0
        self._matrices, right, xp = [], 0, module_of(like)
        for name, start, rows, columns in shapes:
            p = self._lefts[at : at + rows * rank].reshape(rows, rank)
            q = self._rights[right : right + columns * rank].reshape(columns, rank)
            key = key_of(seed, 0, f"powersgd/{name}")  # equal on all ranks: products with q are summed
            random = np.random.Generator(np.random.Philox(key=key))
            q[...] = xp.asarray(random.standard_normal(q.shape, np.float32))
            self._matrices.append(_Matrix(name, start, rows, columns, p, q))
            at, right = at + rows * rank, right + columns * rank

    def exchange(self, x: Array, out: Array, lost: Array, step: int) -> Motion:
        """As `Compressor.exchange`. The residual is this rank's gradient less the approximate sum / number of ranks."""
        xp = array_namespace(x)
        lost[...] = x
        for there, here in self._uncompressed:
            self._lefts[here] = x[there]
        for matrix in self._matrices:
            xp.matmul(matrix.of(x), matrix.right, out=matrix.left)
        yield [self._comm.Iallreduce(MPI.IN_PLACE, self._lefts)]
        orthonormalize([matrix.left for matrix in self._matrices])
        for matrix in self._matrices:
            xp.matmul(matrix.of(x).T, matrix.left, out=matrix.right)
        yield [self._comm.Iallreduce(MPI.IN_PLACE, self._rights)]
        out[...] = 0
        for matrix in self._matrices:
            xp.matmul(matrix.left, matrix.right.T, out=matrix.of(out))
            mine = matrix.of(lost)
            mine -= matrix.of(out) / np.float32(self._comm.Get_size())
        for there, here in self._uncompressed:
            out[there] = self._lefts[here]
            lost[there] = 0

    def state(self) -> dict[str, Array]:
        """Right factors by name, from which the next step's power iteration starts."""
        return {f"powersgd/{matrix.name}": matrix.right for matrix in self._matrices}

    def close(self) -> None: ...
