"""Compressed collectives of device arrays have the bits of those of host arrays: on the stand-in for CuPy."""

import numpy as np
import pytest
from support.fakes import cupy

from collectives import Communicator
from collectives.compressed import (
    EncodedAlltoall,
    HierarchicalAllreduce,
    QuantCodec,
    RingAllreduce,
    SegmentedAllreduce,
    SharedScale,
    TwoShotAllreduce,
    run,
)
from collectives.errors import InvalidType
from quant import grouped, parse

WAYS = {
    "two_shot": TwoShotAllreduce,
    "ring": RingAllreduce,
    "segmented": lambda *arguments, **options: SegmentedAllreduce(*arguments, segments=3, **options),
    "hierarchical": HierarchicalAllreduce,
    "shared_scale": lambda comm, count, codec, like=None: SharedScale(comm, count, 4, 32, like),
}
CODECS = {
    "int8": lambda rank: QuantCodec(grouped(8, 32, "fp32")),
    "int3": lambda rank: QuantCodec(parse("int3_g64")),
    "e4m3": lambda rank: QuantCodec(grouped(8, 32, code="e4m3")),
    "stochastic": lambda rank: QuantCodec(grouped(4, 32, "fp32", rounding="stochastic"), seed=rank),
}


@pytest.fixture
def comm(gpu, world):
    with Communicator(world, cuda_aware=False, nodes=[rank // 2 for rank in range(world.size)]) as made:
        yield made


def vector(comm, count, rank=None):
    return np.random.default_rng(comm.rank if rank is None else rank).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("count", [0, 100, 4001])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("way", WAYS)
def test_allreduce(comm, way, codec, count):
    x = vector(comm, count)
    out, lost = np.empty((2, count), np.float32)
    with WAYS[way](comm, count, CODECS[codec](comm.rank)) as made:
        run(made.allreduce(x, out, lost))
    there = cupy.asarray(x)
    found, missing = cupy.empty(count, np.float32), cupy.empty(count, np.float32)
    with WAYS[way](comm, count, CODECS[codec](comm.rank), like=cupy) as made:
        run(made.allreduce(there, found, missing))
        np.testing.assert_array_equal(there.get(), x)
        run(made.allreduce(there, there))
    np.testing.assert_array_equal(found.get(), out)
    np.testing.assert_array_equal(missing.get(), lost)
    assert len({array.tobytes() for array in comm.allgather(there.get())}) == 1


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [0, 33, 500])
def test_alltoall(comm, codec, count):
    x = vector(comm, count * comm.size)
    out, lost = np.empty_like(x), np.empty_like(x)
    with EncodedAlltoall(comm, count, count, CODECS[codec](comm.rank)) as made:
        run(made.alltoall(x, out, lost))
    found, missing = cupy.empty(len(x), np.float32), cupy.empty(len(x), np.float32)
    with EncodedAlltoall(comm, count, count, CODECS[codec](comm.rank), like=found) as made:
        run(made.alltoall(cupy.asarray(x), found, missing))
    np.testing.assert_array_equal(found.get(), out)
    np.testing.assert_array_equal(missing.get(), lost)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("way", WAYS)
def test_a_group_that_is_not_finite(comm, gpu, way, odd):
    """It becomes so on all ranks, and the host waits for no device to know."""
    x = np.ones(256, np.float32)
    if comm.rank == comm.size - 1:
        x[70] = odd
    there = cupy.asarray(x)
    with WAYS[way](comm, 256, CODECS["int8"](0), like=cupy) as made, np.errstate(invalid="ignore"):
        gpu.log.clear()
        run(made.allreduce(there, there))
        assert not any(kind == "read" for kind, *_ in gpu.log)
        found = there.get()
    assert not np.isfinite(found[64:96]).any()
    np.testing.assert_allclose(np.delete(found, slice(64, 96)), comm.size, rtol=1e-6)


def test_what_is_no_gpu_is_refused(comm):
    for wrong in (np, np.ones(3), "cuda"):
        with pytest.raises(InvalidType, match="like: expected cupy"):
            TwoShotAllreduce(comm, 10, CODECS["int8"](0), like=wrong)
