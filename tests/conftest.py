"""What all tests share: the harness for many ranks, and the communicators to test with."""

import gc
import hashlib
import os
import sys
import tempfile

import pytest
from support.tiers import covering

os.environ["XDG_CACHE_HOME"] = tempfile.gettempdir() + "/chorus-tests"  # what was tuned on this machine decides nothing

pytest_plugins = ["support.harness"]

DEFAULT = "not full"
"""Marks of the default tier, for -m."""


def parameter_values(case, marks):
    """Values of a case, one for each `parametrize`; by identity, since all cases of a test share them."""
    params = dict(case.params)
    for mark in marks:
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield tuple(names), tuple(id(params.pop(name)) for name in names)
    yield from ((name, id(value)) for name, value in params.items())  # of fixtures


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Leave out of the default tier all cases of a test but a few in which every value of every parameter occurs.

    Of a test marked `sweep(share)` it takes one of `share` values of the parameter with the most, others in every test.
    Such a test's subject is what runs algorithms, layouts or options: its faults show with many of them. What is wrong
    with one of them is found by the tests whose subject it is, none of which is a sweep.
    """
    yield
    test = metafunc.definition
    if metafunc.config.option.markexpr != DEFAULT or test.get_closest_marker("full") is not None:
        return
    marks = list(test.iter_markers("parametrize"))
    cases = [case for case in metafunc._calls if all(mark.name != "full" for mark in case.marks)]
    if len(cases) > 1:
        # An order that mixes the values of all parameters, and is the same on all ranks.
        mixed = sorted(range(len(cases)), key=lambda at: hashlib.md5(f"{test.name}[{cases[at].id}]".encode()).digest())
        values = {at: set(parameter_values(cases[at], marks)) for at in mixed}
        if sweep := test.get_closest_marker("sweep"):
            values = swept(values, *sweep.args)
        metafunc._calls = [cases[at] for at in sorted(covering(values))]


def swept(values, share):
    """Cases with one of `share` values of the parameter that has the most."""
    parameters = {}
    for some in values.values():
        for name, value in some:
            parameters.setdefault(name, {})[name, value] = True
    longest = max(parameters.values(), key=len)
    kept = {*list(longest)[::share]}
    return {at: some for at, some in values.items() if some & kept}


def pytest_collection_finish():
    freeze_objects()


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        freeze_objects()


def freeze_objects():
    """Exclude modules, collected tests and compiled code from garbage collection, which would visit them every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def world():
    """mpi4py's COMM_WORLD: the MPI that we measure ourselves against."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def pytest_addoption(parser):
    parser.addoption(
        "--apart", action="store_true", help="test communicators whose ranks share no memory: MPI carries all messages"
    )
    parser.addoption("--gpu-seconds", type=float, default=0, help="seconds after which tests/gpu begins no test")
    parser.addoption("--gpu-part", default="0/1", help="part of tests/gpu, of how many: 1/4 runs every fourth test")
    parser.addoption("--real-cupy", action="store_true", help="use CuPy without a driver: for tests/real_cupy alone")


@pytest.fixture(scope="session")
def comm(world, request):
    """The same ranks as a `collectives.Communicator`: what is tested."""
    from collectives import Communicator

    return Communicator(world, shared=not request.config.getoption("--apart"))


@pytest.fixture
def frequent_switches():
    """Threads take turns after every few instructions, so that races show."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.fixture
def gpu(monkeypatch):
    """A new GPU for the stand-in for CuPy, which takes CuPy's place."""
    from support.standin import cupy, recorder

    recorder.start(cupy)

    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy, "GPU", cupy._Gpu())
    monkeypatch.setattr("collectives.transport.gpu.shared_gpu.PROBED", 1 << 22)  # 64 MiB take 0.2 s of a processor
    yield cupy.GPU
    recorder.check_forms(cupy)
