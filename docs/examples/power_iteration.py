"""Power iteration: largest eigenvalue of a matrix whose rows are divided over the ranks, with CuPy or NumPy arrays.

The communicator's methods take arrays on a GPU as they take NumPy's, so the program has no branch for either.

    mpiexec -n 3 python power_iteration.py
"""

import numpy as np
from mpi4py import MPI

from collectives import Communicator


def array_module():
    """CuPy if there is a GPU, else NumPy."""
    try:
        import cupy

        return cupy if cupy.cuda.runtime.getDeviceCount() else np
    except (ImportError, RuntimeError):  # no CuPy, or no driver
        return np


def power_iteration(comm, xp, rows, tolerance=1e-12, most=1000):
    """Largest eigenvalue, by its size, and its vector; `rows` (n/p, n) are this rank's part of the matrix."""
    n = rows.shape[1]
    if n != len(rows) * comm.size:
        raise ValueError(f"rows: expected {n} rows on {comm.size} ranks, equally many on each; found {len(rows)}")
    x, before = xp.full(n, n**-0.5), 0.0
    for _ in range(most):
        y = xp.empty_like(x)
        comm.Allgather(rows @ x, y)
        value = float(x @ y)  # the Rayleigh quotient: x has length 1
        x = y / (y @ y) ** 0.5
        if abs(value - before) <= tolerance * abs(value):
            break
        before = value
    return value, x


def main(comm, xp=None):
    xp = xp or array_module()
    n = 20 * comm.size
    a = np.random.default_rng(0).random((n, n))
    a += a.T  # symmetric: real eigenvalues
    value, _ = power_iteration(comm, xp, xp.asarray(np.split(a, comm.size)[comm.rank]))
    np.testing.assert_allclose(value, abs(np.linalg.eigvalsh(a)).max(), rtol=1e-9)
    if comm.rank == 0:
        print(f"{xp.__name__}: largest eigenvalue {value:.6f}")


if __name__ == "__main__":
    main(Communicator(MPI.COMM_WORLD))
