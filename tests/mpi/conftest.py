"""Tests for any number of ranks: ``mpiexec -n 3 python -m pytest --with-mpi tests/mpi``.

The default tier runs a test on the numbers of ranks of its folder in `RANKS`, or of its mark `ranks`.
"""

import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from support.engines import use_interpreter

HERE = Path(__file__).parent
LARGEST = 3
"""Ranks of the default tier at most; on more it runs all tests."""
RANKS = {"collectives": (1, 3), "quant": (1, 3), "parallel": (2,), "scripts": (2,), "docs": (2, 3), ".": (1, 3)}
"""Numbers of ranks of the default tier, by folder: those on which a test can find a fault that no other one finds.

Three ranks are the fewest with a sum whose order matters, a ring with a direction, a stage in the middle, two workers
of a server, and two ranks that wait for one. What does not depend on these, as arguments, objects, errors of settings,
memory and counts, has a mark for two ranks: they are quicker where three would share two cores.
"""


def pytest_ignore_collect(collection_path, config):
    """Leave out files without tests of the default tier on this number of ranks, unless the command names them."""
    is_default = config.getoption("--with-mpi", False) and config.option.markexpr == "not full"
    is_named = any(Path(name.partition("::")[0]).resolve() == collection_path for name in config.args)
    if is_default and not is_named and collection_path.match("test_*.py") and ranks_of_job() <= LARGEST:
        return ranks_of_job() not in numbers_in(collection_path) or None
    return None


def numbers_in(file):
    """Numbers of ranks on which the default tier runs tests of a file."""
    marks = re.findall(r"^(pytestmark = )?.*\bmark\.ranks\(([\d, ]+)\)", file.read_text(), re.M)
    numbers = {int(number) for _, several in marks for number in several.split(",")}
    return numbers if any(whole for whole, _ in marks) else numbers | set(RANKS[folder_of(file)])


def folder_of(file):
    return file.relative_to(HERE).parent.as_posix()


@pytest.hookimpl(tryfirst=True)  # before pytest-mpi looks for the marker
def pytest_collection_modifyitems(config, items):
    size = ranks_of_job() if config.getoption("--with-mpi", False) else None
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.mpi)
            if size is not None and size <= LARGEST and size not in default_ranks(item):
                item.add_marker(pytest.mark.full)


def ranks_of_job():
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_size()


def default_ranks(item):
    """Numbers of ranks on which the default tier runs a test."""
    mark = item.get_closest_marker("ranks")
    numbers = mark.args if mark else RANKS[folder_of(item.path)]
    assert numbers and max(numbers) <= LARGEST, f"{item.nodeid}: expected some of 1 to {LARGEST} ranks, found {numbers}"
    return numbers


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
