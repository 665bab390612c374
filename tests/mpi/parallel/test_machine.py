"""The peak that MFU is measured against: of all ranks, and of no more cores than they have."""

import importlib
from types import SimpleNamespace

import ml_dtypes
import pytest
from mpi4py import MPI

from parallel.runtime import resources


def test_the_peak_is_that_of_ranks_that_train_and_of_their_dtype(monkeypatch, world):
    """Rank 0 serves and does not multiply; the others have a product each second, or of float64 every other one."""
    products = []

    def calls_per_second(multiply, seconds):
        with monkeypatch.context() as patch:
            patch.setattr(resources.np, "matmul", lambda a, b, out: products.append(a.dtype))
            multiply()
        return 4 / products[-1].itemsize

    monkeypatch.setitem(resources.MATRIX_SIZE, "cpu", 8)
    monkeypatch.setattr(resources, "_calls_per_second", calls_per_second)
    trains = world.rank > 0 or world.size == 1
    workers = max(1, world.size - 1)
    for dtype, rate in (("f4", 1), ("f2", 1), (ml_dtypes.bfloat16, 1), ("f8", 0.5)):
        assert resources.peak_flops(world, dtype=dtype, trains=trains) == workers * 2 * 8**3 * rate
    assert bool(products) == trains


def test_calls_per_second(monkeypatch):
    clock = iter([10.0, 10.5, 11.0, 11.25, 12.0, 20.0, 25.0])
    monkeypatch.setattr(resources.time, "perf_counter", lambda: next(clock))
    assert resources._calls_per_second(lambda: None, 1.2) == 3 / 1.25
    assert resources._calls_per_second(lambda: None, 0.0) == 1 / 8


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
        fault_tolerant=True, is_reporter=True, trains=True, settings=SimpleNamespace(precision="fp32", device="cpu")
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
            with pytest.raises(ValueError, match=r"not enough memory: .*, and the container has 999 B"):
                resources.check_memory(world, {"gradients": 1000})
