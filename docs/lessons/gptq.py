"""GPTQ: weights are rounded to few bits one input at a time, and later inputs correct the error made so far.

Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023, section 3; the correction: Hassibi and Stork, "Optimal Brain Surgeon", NIPS 1992.

A layer is y = W x, and many of its inputs x are known, the rows of X. Wanted is a rounded W with little change of y.
Each row w of W stands alone: with q the rounded row and e = w - q, the squared error over all inputs is e H e^T, where
H = X^T X. After weight j is rounded to q_j, the weights after it take the values that keep the error smallest:

    w_later -= (w_j - q_j) / C[0, 0] * C[0, 1:],        C = inverse of H[j:, j:]

C[0, :] / sqrt(C[0, 0]) is row j of U, the upper triangular Cholesky factor of the whole H's inverse (U^T U = H^-1). So
one factorisation serves all steps and all rows.

Each rank has some of the samples: an allreduce sums H. Each rounds some of the rows: an allgather collects them.
"""

import numpy as np
from mpi4py import MPI

from collectives import Communicator


def nearest(w, scale):
    """Round to the nearest of the 15 levels -7 to 7 times the row's scale: symmetric 4 bits."""
    return np.clip(np.rint(w / scale), -7, 7) * scale


def cholesky_of_inverse(h, damping=0.01):
    """U with U^T U = H^-1; a share of the diagonal's mean is added to H, so that it has an inverse."""
    damped = h + damping * np.diag(h).mean() * np.eye(len(h))
    return np.linalg.cholesky(np.linalg.inv(damped)).T


def gptq(w, upper):
    """Quantise the rows of w (outputs, inputs)."""
    w, scale = w.copy(), np.abs(w).max(axis=1) / 7
    q = np.empty_like(w)
    for j in range(w.shape[1]):
        q[:, j] = nearest(w[:, j], scale)
        error = (w[:, j] - q[:, j]) / upper[j, j]
        w[:, j + 1 :] -= np.outer(error, upper[j, j + 1 :])
    return q


def plain_gptq(w, h, damping=0.01):
    """Do the same with the formula of the docstring: a new inverse in every step."""
    w, scale = w.copy(), np.abs(w).max(axis=1) / 7
    q, damped = np.empty_like(w), h + damping * np.diag(h).mean() * np.eye(len(h))
    for j in range(w.shape[1]):
        c = np.linalg.inv(damped[j:, j:])
        q[:, j] = nearest(w[:, j], scale)
        w[:, j + 1 :] -= np.outer((w[:, j] - q[:, j]) / c[0, 0], c[0, 1:])
    return q


def quantize(comm, w, x):
    """Quantise w (outputs, inputs), whole on all ranks, for the inputs of all ranks' samples x."""
    h = np.empty((x.shape[1], x.shape[1]))
    comm.Allreduce(x.T @ x, h)
    if len(w) % comm.size:
        raise ValueError(f"w: expected rows in a multiple of {comm.size} ranks, found {len(w)}")
    q = np.empty_like(w)
    comm.Allgather(gptq(np.split(w, comm.size)[comm.rank], cholesky_of_inverse(h)), q)
    return q


def main(comm):
    random = np.random.default_rng(0)  # the same numbers on all ranks
    w = random.normal(size=(12, 16))
    x = random.normal(size=(64, 4)) @ random.normal(size=(4, 16)) + 0.3 * random.normal(size=(64, 16))  # correlated
    q = quantize(comm, w, x[comm.rank :: comm.size])
    np.testing.assert_allclose(q, plain_gptq(w, x.T @ x), atol=1e-12)
    rounded = nearest(w.T, np.abs(w).max(axis=1) / 7).T
    before, after = (np.sum((x @ (w - one).T) ** 2) for one in (rounded, q))
    assert after < before / 2
    if comm.rank == 0:
        print(f"squared error of the layer's output: rounded to nearest {before:.2f}, by GPTQ {after:.2f}")


if __name__ == "__main__":
    main(Communicator(MPI.COMM_WORLD))
