"""Ranks that share a GPU, on the stand-in for CuPy: limits of their pools, and steps that run out of memory."""

import numpy as np
import pytest
from support.fakes import cupy

from collectives import Communicator
from collectives.runtime.builders.program_builder import ProgramBuilder
from parallel.data.sampler import Batch
from parallel.engine.data_parallel.sharded_optimizer import ShardedOptimizer
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.optim.optimizers import AdamW
from parallel.runtime.consistency_check import StepFailed
from parallel.runtime.vector_memory import SHARE

LENGTH = 16


@pytest.fixture
def engine(gpu, world):
    comm = Communicator(world, cuda_aware=False)
    model = build("gpt:tiny", (LENGTH,), 256)
    made = DataParallelEngine(model, SoftmaxCrossEntropy(), comm, AdamW(rate=1e-3), Settings(device="cuda"))
    yield made
    made.close()
    assert not gpu.limit
    comm.close()


def batch(world, samples=2):
    x = np.arange(samples * LENGTH).reshape(samples, LENGTH) % 256
    return Batch(world.rank, x, x, np.arange(samples))


def test_limit_of_the_pool(engine, gpu, world):
    if world.size == 1:
        assert not gpu.limit
    else:
        free = gpu.limit - cupy.get_default_memory_pool().total_bytes()
        assert 0.9 < free / (SHARE * gpu.total / world.size) <= 1


@pytest.mark.parametrize("room", [0, 1 << 15, 1 << 17])
def test_out_of_memory_is_agreed(engine, gpu, world, room):
    """All ranks raise, with the rank, the operator and the bytes; nothing was updated, and the next step succeeds."""
    before, last = gpu.limit, world.size - 1
    engine.step([batch(world)])
    if world.rank == last:
        gpu.limit = gpu.used() + room
    gpu.log.clear()
    with pytest.raises(
        StepFailed, match=rf"nothing was updated; rank {last}: OutOfMemoryError: Out of memory"
    ) as failed:
        engine.step([batch(world, 8)])
    assert "allocating" in str(failed.value) and "bytes" in str(failed.value)
    assert not room or "in the " in str(failed.value)  # forward or backward of an operator
    assert engine.updates == 1 and ("free blocks", 0, 0) in gpu.log
    gpu.limit = before
    assert engine.step([batch(world)]).loss > 0


def test_out_of_memory_in_the_update(engine, gpu, world, monkeypatch):
    """All ranks raise before any weight is changed; with what was reserved, the update allocates nothing."""
    limit, last, reserve = gpu.limit, world.size - 1, AdamW.reserve

    def without_room(self, pieces):
        if world.rank == last:
            gpu.limit = gpu.used()
        reserve(self, pieces)

    with monkeypatch.context() as patched:
        patched.setattr(AdamW, "reserve", without_room)
        with pytest.raises(StepFailed, match=rf"nothing was updated; rank {last}: OutOfMemoryError: Out of memory"):
            engine.step([batch(world)])
    gpu.limit = limit
    assert engine.updates == 0
    update = ShardedOptimizer.update

    def full(self, *arguments):
        gpu.limit = gpu.used()
        update(self, *arguments)
        gpu.limit = limit

    monkeypatch.setattr(ShardedOptimizer, "update", full)
    assert engine.step([batch(world)]).loss > 0 and engine.updates == 1


def test_out_of_memory_of_a_request(engine, world, monkeypatch):
    """The first step makes the requests that sum gradients; all ranks raise if one has no memory for its part."""
    with monkeypatch.context() as patched:
        if world.rank == world.size - 1:
            patched.setattr(ProgramBuilder, "bind", out_of_memory)
        with pytest.raises(
            StepFailed, match=f"nothing was updated; .*no memory for the request .* on rank {world.size - 1}"
        ):
            engine.step([batch(world)])
    assert engine.updates == 0 and engine.step([batch(world)]).loss > 0


def out_of_memory(*_, **__):
    raise cupy.cuda.memory.OutOfMemoryError(1, 2)


def test_host_waits_of_a_step(gpu, world):
    """Among ranks that share a GPU by kernels: for the loss and the gradient's norm; collectives only poll."""
    if world.size == 1:
        pytest.skip("needs two processes")
    works = cupy.Engine(gpu, world.rank)
    with Communicator(world, cuda_aware=False) as comm:
        assert comm.device_transfer == "kernel"
        model = build("gpt:tiny", (LENGTH,), 256)
        with DataParallelEngine(
            model, SoftmaxCrossEntropy(), comm, AdamW(rate=1e-3), Settings(device="cuda", clip=1.0)
        ) as engine:
            engine.step([batch(world)])
            gpu.log.clear()
            engine.step([batch(world)])
            waits = [kind for kind, *_ in gpu.log if kind in ("read", "wait", "to_host")]
            world.Barrier()
    works.stop()
    assert waits == ["read"] * 2
