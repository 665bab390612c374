"""Engines that an exception leaves, on all ranks or on one, free what their rank can free alone."""

import gc
import os

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.runtime.requests.program_end import open_communicators
from parallel import AdamW, Engine, nn
from parallel.data.work_queue import WorkQueue
from parallel.runtime import left_windows
from parallel.runtime.consistency_check import RankLeft
from parallel.sharding.device_mesh import DeviceMesh
from parallel.sharding.mesh import Mesh

X = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
Y = np.arange(12) % 4


def engine(comm, **options):
    return Engine(nn.mlp([8, 16, 4]), nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.05), **options)


def held():
    """Descriptors, mapped segments and communicators of this process."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        segments = sum("memfd:chorus" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), segments, len(open_communicators)


def options_of(layout, size):
    if layout == "pool":
        return {"layout": "dp", "pool": True}
    if layout == "tp":
        return {"mesh": f"tp={size}"} if size in (1, 2, 4) else None
    if layout.startswith("pp"):
        return {"layout": layout} if size <= 2 else None
    return {"layout": layout} if layout != "ps" or size > 1 else None


LAYOUTS = ["dp", "zero1", "zero3", "tp", "pp:1f1b", "local", "sgp", "group", "hogwild", "ps", "pool"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exception_on_all_ranks(world, layout):
    options = options_of(layout, world.size)
    if options is None:
        pytest.skip("not with these ranks")
    found = []
    unmet = (RankLeft,) if layout in ("sgp", "hogwild", "ps") else ()  # ranks do not end a step together
    for _ in range(6):
        made = engine(world, **options)
        with pytest.raises((KeyError, *unmet)), made:
            made.step(X, Y)
            raise KeyError("mine")
        with pytest.raises(RuntimeError, match="expected an open engine"):
            made.step(X, Y)
        found.append(held())
    assert found[1:] == [found[1]] * 5
    made.close()  # on all ranks
    assert not any(left_windows._left.values())
    made.close()


@pytest.mark.parametrize("layout", ["dp", "zero1", "zero3", "tp", "pp:1f1b"])
def test_exception_on_one_rank(world, layout):
    options = options_of(layout, world.size)
    if options is None:
        pytest.skip("not with these ranks")
    found = []
    for turn in range(6):
        try:
            with engine(world, **options) as made:
                made.step(X, Y)
                if world.rank == turn % world.size:
                    raise KeyError("mine")
        except (KeyError, RankLeft):  # of the rank, and of the others, which close the engine
            pass
        del made
        found.append(held())
    assert found[1:] == [found[1]] * 5


INVALID = [{"clip": -1.0}, {"clop": 1}, {"mesh": "tp=7"}, {"layout": "pp:1f1b", "cuts": "0,9"}]


@pytest.mark.parametrize("options", INVALID)
def test_constructor_that_raises(world, options):
    found = []
    for _ in range(4):
        with pytest.raises(ValueError, match=r"clip|clop|mesh|cuts|stages"):
            engine(world, **options)
        found.append(held())
    assert found == [found[0]] * 4
    engine(world).close()


class Refusing(nn.Linear):
    """Operator whose parameter has an initialiser that fails, when the engine has most of what it needs."""

    def __init__(self):
        super().__init__(8, 4)
        self.weight.init = self.fail

    def fail(self, random, shape):
        raise OSError("no values")


@pytest.mark.parametrize("layout", ["dp", "zero3", "local"])
def test_constructor_that_raises_late(world, layout):
    found = []
    for _ in range(4):
        model = nn.Sequential(Refusing())
        with pytest.raises(OSError, match="no values"):
            Engine(model, nn.SoftmaxCrossEntropy(), world, AdamW(lr=0.1), layout=layout)
        found.append(held())
    assert found[1:] == [found[1]] * 3


@pytest.mark.full
@pytest.mark.parametrize("who", ["all", "one"])
def test_long_sweep(world, who):
    """More engines than MPI has communicators, or a process descriptors."""
    for turn in range(500):
        try:
            with engine(world) as made:
                made.step(X, Y)
                if who == "all" or world.rank == 0:
                    raise KeyError("mine")
        except (KeyError, RankLeft):  # of the rank, and of the others, which close the engine
            pass
        del made
        if turn == 10:
            before = held()
    assert held() == before


def test_what_engines_are_made_of(world):
    """Communicators, meshes and queues that an exception leaves."""
    found = []
    for _ in range(5):
        with pytest.raises(KeyError), Communicator(world) as comm:
            comm.Allreduce(MPI.IN_PLACE, np.ones(3))
            with DeviceMesh(comm, Mesh({"dp": world.size})) as mesh:
                mesh.axis("dp").comm.Barrier()
                with WorkQueue(world) as pool:
                    list(pool.draw(3))
                    raise KeyError("mine")
        with pytest.raises(RuntimeError, match="pool: it has been closed"):
            pool.draw(3)
        found.append(held())
        left_windows.free_left(world)
    assert found[1:] == [found[1]] * 4
    assert not any(left_windows._left.values())
