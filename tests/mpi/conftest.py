"""Tests for any number of ranks: ``mpiexec -n 3 python -m pytest --with-mpi tests/mpi``."""

import shutil
import tempfile
import time
from pathlib import Path

import pytest
from support.engines import use_interpreter


@pytest.hookimpl(tryfirst=True)  # before pytest-mpi looks for the marker
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.mpi)


@pytest.fixture
def folder(world):
    """The same new folder on all ranks of a node."""
    path = world.bcast(tempfile.mkdtemp() if world.Get_rank() == 0 else None)
    if not all(world.allgather(Path(path).is_dir())):
        pytest.skip("ranks share no directory")
    yield Path(path)
    world.Barrier()
    if world.Get_rank() == 0:
        shutil.rmtree(path)


@pytest.fixture
def impatient(monkeypatch, seconds=2):
    """Waits for the other ranks of a node end with an error after `seconds`: these may have met an error."""
    from support.fakes import cupy

    from collectives.transport.node.mailbox import NodeMemory

    deadlines = {}

    def yielding(self, pauses):
        now = time.monotonic()
        if now > deadlines.setdefault(pauses, now + seconds):
            raise TimeoutError
        self.comm.Iprobe()

    monkeypatch.setattr(NodeMemory, "yielding", yielding)
    monkeypatch.setattr(cupy.interprocess, "PATIENCE", seconds)


INTERPRETED = {"compiled": lambda rank: False, "interpreted": lambda rank: True, "mixed": lambda rank: rank % 2 == 1}
"""Functions that return True for the ranks whose programs the interpreter runs."""


@pytest.fixture(params=INTERPRETED)
def on_engines(world, request, monkeypatch):
    """Communicator whose programs the compiled engine runs, the interpreter, or on odd ranks the interpreter."""
    from collectives import Communicator

    if INTERPRETED[request.param](world.Get_rank()):
        use_interpreter(monkeypatch)
    with Communicator(world) as comm:
        yield comm
