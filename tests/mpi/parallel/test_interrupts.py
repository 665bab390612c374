"""Ctrl-C on one rank, anywhere in a call of all ranks, ends the call on all of them."""

import signal
import sys
import time

import numpy as np
import pytest
from mpi4py import MPI
from support.tiers import default

from parallel import AdamW, Engine, nn
from parallel.checkpoint.step_folders import CheckpointError
from parallel.runtime import left_windows
from parallel.runtime.consistency_check import RankLeft, StepFailed

X = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
Y = np.arange(12) % 4
CALLS = {
    "step": lambda made, folder: made.step(X, Y),
    "evaluate": lambda made, folder: made.evaluate(X, Y),
    "state_dict": lambda made, folder: made.state_dict(),
    "load_state_dict": lambda made, folder: made.load_state_dict({}, strict=False),
    "save": lambda made, folder: made.save(folder),
    "load": lambda made, folder: made.load(folder),
}
LAYOUTS = ["dp", "zero1", "zero3", "pp:1f1b", "local", "group", "sgp", "hogwild", "ps"]
SECONDS = 2


@pytest.fixture(autouse=True)
def no_windows_are_left():
    yield
    left_windows.free_left(MPI.COMM_WORLD)
    assert not any(left_windows._left.values())


class Interrupt:
    """Context in which the function call of this number, of Python or of C, raises KeyboardInterrupt."""

    def __init__(self, number):
        self._left = number

    def _count(self, frame, event, argument):
        if event in ("call", "c_call"):
            self._left -= 1
            if self._left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def __enter__(self):
        sys.setprofile(self._count)

    def __exit__(self, *error):
        sys.setprofile(None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python's own, in an ended generator
@pytest.mark.parametrize("number", default([1, 30, 120, 400, 1200], 120))
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layout", default(LAYOUTS, "zero1", "pp:1f1b", "local", "ps"))
def test_interrupt_of_one_rank(comm, layout, call, number, tmp_path_factory):
    size = comm.Get_size()
    if size == 1 or (layout == "pp:1f1b" and size != 2):
        pytest.skip("not with these ranks")
    folder = comm.bcast(tmp_path_factory.mktemp("run") if comm.rank == 0 else None)
    victim = number % size
    began = None
    ranks = MPI.COMM_WORLD.Dup()  # not freed: messages of an interrupted call may arrive in it
    with (
        pytest.raises((KeyboardInterrupt, RankLeft, StepFailed, CheckpointError, ValueError)) as found,
        Engine(nn.mlp([8, 16, 4]), nn.SoftmaxCrossEntropy(), ranks, AdamW(lr=0.05), layout=layout) as made,
    ):
        made.step(X, Y)
        made.save(folder)
        began = time.monotonic()
        if comm.rank == victim:
            with Interrupt(number):
                CALLS[call](made, folder)
            raise KeyboardInterrupt  # the call is shorter
        while True:
            CALLS[call](made, folder)
    assert time.monotonic() - began < SECONDS
    if comm.rank == victim:
        assert found.type is KeyboardInterrupt
    else:
        assert "KeyboardInterrupt" in str(found.value)


class Interrupting(nn.Linear):
    """Operator whose parameter interrupts one rank when it is initialised, in the engine's constructor."""

    def __init__(self, victim):
        super().__init__(8, 4)
        self._victim, self._own = victim, self.weight.init
        self.weight.init = self.start

    def start(self, random, shape):
        if MPI.COMM_WORLD.rank == self._victim:
            signal.raise_signal(signal.SIGINT)
        return self._own(random, shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_interrupt_of_a_constructor(comm, layout):
    """The rank raises KeyboardInterrupt at its end; the others have an engine, whose first step fails."""
    size = comm.Get_size()
    if size == 1 or layout == "pp:1f1b":
        pytest.skip("not with these ranks")
    model = nn.Sequential(Interrupting(size - 1))
    began = time.monotonic()
    with (
        pytest.raises((KeyboardInterrupt, RankLeft)) as found,
        Engine(model, nn.SoftmaxCrossEntropy(), MPI.COMM_WORLD.Dup(), AdamW(lr=0.05), layout=layout) as made,
    ):
        while True:
            made.step(X, Y)
    assert time.monotonic() - began < SECONDS
    assert found.type is (KeyboardInterrupt if comm.rank == size - 1 else RankLeft)
