"""What all tests share: the harness for many ranks, and the communicators to test with."""

import os
import sys
import tempfile

import pytest

os.environ["XDG_CACHE_HOME"] = tempfile.gettempdir() + "/chorus-tests"  # what was tuned on this machine decides nothing

pytest_plugins = ["support.harness"]


@pytest.fixture(scope="session")
def world():
    """mpi4py's COMM_WORLD: the MPI that we measure ourselves against."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def pytest_addoption(parser):
    parser.addoption(
        "--apart", action="store_true", help="test communicators whose ranks share no memory: MPI carries all messages"
    )


@pytest.fixture(scope="session")
def comm(world, request):
    """The same ranks as a `collectives.Communicator`: what is tested."""
    from collectives import Communicator

    return Communicator(world, shared=not request.config.getoption("--apart"))


@pytest.fixture
def gpu(monkeypatch):
    """A new GPU for the stand-in for CuPy, which takes CuPy's place."""
    from support.standin import cupy

    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy, "GPU", cupy._Gpu())
    return cupy.GPU
