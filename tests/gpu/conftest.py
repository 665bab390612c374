"""Tests on a real GPU: scripts/gpu_check runs them; without CuPy or a GPU they are skipped and say why."""

import time
import warnings
from pathlib import Path

import pytest

BEGAN = time.monotonic()
LEFT_TO_OTHERS = pytest.StashKey[bool]()
LEFT_OUT = []
"""Tests for which there was no time."""


def missing():
    """What stands in the way of a CuPy array on a GPU, or None."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about libraries that are not installed
            import cupy
    except ImportError as error:
        return f"no CuPy ({error})"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "CuPy finds no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU ({error})"


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Mark the tests before pytest-mpi looks for the marker; cut what options such as -k leave into parts."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    reason = missing() if here else None
    for item in here:
        item.add_marker(pytest.mark.mpi)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
    result = yield
    part, parts = map(int, config.getoption("--gpu-part").split("/"))
    if others := [item for index, item in enumerate(items) if index % parts != part]:
        config.hook.pytest_deselected(items=others)
        items[:] = items[part::parts]
        config.stash[LEFT_TO_OTHERS] = True
    return result


def is_over(config, world):
    """True on all ranks if the seconds of --gpu-seconds have passed on the first."""
    seconds = config.getoption("--gpu-seconds")
    return bool(seconds and world.bcast(time.monotonic() - BEGAN > seconds))


@pytest.fixture(autouse=True)
def time_left(request, world):
    """Skip tests, the same ones on all ranks, after the seconds of --gpu-seconds."""
    if is_over(request.config, world):
        LEFT_OUT.append(request.node.name)
        pytest.skip("no time left")


def pytest_sessionfinish(session, exitstatus):
    """A part may have no tests if others have some."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash.get(LEFT_TO_OTHERS, False):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter):
    if LEFT_OUT:
        terminalreporter.line(f"below the goal: {len(LEFT_OUT)} tests were left out: no time")


@pytest.fixture(scope="session")
def cupy():
    import cupy

    return cupy


@pytest.fixture(scope="session", params=["staged", "pinned", "network", "kernel", "direct"])
def comm(request, world, cupy):
    """A communicator with each transfer of device arrays that is possible here, for all tests that use it.

    "network": pinned memory, with every rank on a node of its own.
    """
    from collectives import Communicator
    from collectives.transport.mpi.cuda_support import cuda_aware

    if is_over(request.config, world):
        pytest.skip("no time left")
    direct = request.param == "direct"
    reachable = getattr(getattr(cupy, "GPU", None), "private", True) is False  # the stand-in's memory, by any MPI
    if direct and not (cuda_aware() or reachable):
        pytest.skip("this MPI does not say that it is CUDA-aware")
    network = request.param == "network"
    wanted = "staged" if direct else "pinned" if network else request.param
    made = Communicator(world, cuda_aware=direct, nodes=range(world.size) if network else None, gpu=wanted)
    found = made.device_transfer
    once = world.Get_size() == 1 and request.param == "staged"  # a rank that is alone has nothing to transfer
    if not (once or found.startswith("pinned" if network else request.param)):
        made.close()
        pytest.skip(f"not {request.param}, but {found}")
    yield made
    made.close()
