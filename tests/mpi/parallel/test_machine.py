"""The peak that MFU is measured against: of all ranks, and of no more cores than they have."""

import importlib
import os
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from parallel.runtime import resources

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="ranks cannot be put on one core")


@pytest.fixture
def one_core():
    """All ranks on the same core."""
    before = os.sched_getaffinity(0)
    core = MPI.COMM_WORLD.bcast(min(before))
    try:
        os.sched_setaffinity(0, {core})
    except OSError:
        core = None
    if None in MPI.COMM_WORLD.allgather(core):
        os.sched_setaffinity(0, before)
        pytest.skip("ranks cannot be put on one core")
    yield
    os.sched_setaffinity(0, before)


def test_ranks_that_take_turns_on_a_core_have_one(one_core):
    """As fast together as one of them alone, within the noise of a machine that others use."""
    world = MPI.COMM_WORLD
    alone = resources.peak_flops(MPI.COMM_SELF, seconds=0.05)
    alone, together = max(world.allgather(alone)), resources.peak_flops(world, seconds=0.2)
    assert together < 1.5 * alone
    assert resources._cores_at_once(world, 4) == 1 / world.size


def test_threads_count_as_far_as_there_are_cores(monkeypatch):
    """On a node of four cores with two of these for each rank, say."""
    world = MPI.COMM_WORLD
    nodes = world.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = nodes.Get_size()
    nodes.Free()
    monkeypatch.setattr(resources, "_cores", lambda node: (2, 4))
    assert resources._cores_at_once(world, 1) == pytest.approx(min(1, 4 / ranks))
    assert resources._cores_at_once(world, 3) == pytest.approx(2 * min(1, 2 / ranks))


def test_more_threads_than_cores(monkeypatch, world):
    ranks = world.Split_type(MPI.COMM_TYPE_SHARED)
    monkeypatch.setattr(resources, "_cores", lambda node: (2, 2 * node.Get_size()))
    assert resources.crowd(world, 2) is None
    count = ranks.Get_size()
    ranks.Free()
    if world.allreduce(count, MPI.MIN) == world.size:
        have = f"{world.size} ranks of a node have {3 * world.size} threads on {2 * world.size} cores: they take turns"
        assert resources.crowd(world, 3).startswith(have)


def test_mfu_of_a_training_that_outlives_ranks_is_of_all_ranks(monkeypatch):
    """The peak is measured while all ranks are there, before each goes on without the others."""
    pytest.importorskip("safetensors")
    train = importlib.import_module("parallel.cli.train_run")
    seen = []

    def peak(comm, *_, **__):
        seen.append(comm)
        raise InterruptedError

    monkeypatch.setattr(train.resources, "peak_flops", peak)
    monkeypatch.setattr(train.watchdog, "stop", lambda: None)
    monkeypatch.setattr(train.launcher, "print_when", lambda is_reporter: None)
    training = SimpleNamespace(
        fault_tolerant=True, is_reporter=True, flops_per_sample=1.0, executed_flops_per_sample=1.0
    )
    with pytest.raises(InterruptedError):
        train.train(MPI.COMM_WORLD, SimpleNamespace(device="cpu", threads=1), training)
    assert seen == [MPI.COMM_WORLD]


def test_the_memory_of_a_container_is_that_of_its_ranks(monkeypatch, world):
    """Ranks may have a container each or share one; all are told of one with too little, as if it were theirs."""
    for limits, enough in (
        ({("own", world.rank): 1000}, True),
        ({"one": 1000 * world.size}, True),
        ({"one": 999}, False),
    ):
        monkeypatch.setattr(resources, "container_limits", lambda groups, limits=limits: limits)
        if enough:
            resources.check_memory(world, {"gradients": 1000})
        else:
            with pytest.raises(ValueError, match=r"not enough memory: .*, and the container has 999 bytes"):
                resources.check_memory(world, {"gradients": 1000})
