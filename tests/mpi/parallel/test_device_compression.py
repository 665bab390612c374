"""Compressed gradients on a GPU, by the code that compresses them on the host: on the stand-in for CuPy."""

import sys
from pathlib import Path

import numpy as np
import pytest
from support import tiny_models
from support.device_training import COMPRESSORS, compresses_as_on_the_host
from support.fakes import cupy

from collectives import Communicator
from collectives.runtime.requests.request_lists import wait_all
from parallel.checkpoint import checkpoint_files
from parallel.checkpoint.checkpoint_files import Checkpoint
from parallel.engine.data_parallel.grad_bucket import GradBucket
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.grad_compression import COMPRESSORS as TABLE
from parallel.engine.grad_compression import parse
from parallel.engine.grad_compression.powersgd import orthonormalize
from parallel.engine.grad_compression.signs import SignCompressor
from parallel.engine.settings import Settings
from parallel.nn.flat_params import FlatParams
from parallel.optim.optimizers import SGD
from parallel.runtime.consistency_check import StepFailed

compressors = pytest.mark.parametrize("compress", COMPRESSORS)
families = pytest.mark.parametrize(
    "compress",
    [
        one if one.startswith(("int8", "topk", "powersgd")) else pytest.param(one, marks=pytest.mark.full)
        for one in COMPRESSORS
    ],
)
"""All, of which one of each kind is tested always."""


@pytest.fixture
def comm(gpu, world):
    with Communicator(world, cuda_aware=False) as made:
        yield made


def gradient(comm, bucket, step):
    x = np.zeros(bucket.span.size, np.float32)
    for place in bucket.places:
        start = place.span.start - bucket.span.start
        random = np.random.default_rng([step, comm.rank, start])
        x[start : start + place.size] = random.standard_normal(place.size)
    return x


def test_every_compressor_is_here():
    assert {compress.partition(":")[0] for compress in COMPRESSORS} == set(TABLE)


@compressors
def test_exchange(comm, gpu, compress):
    """Sums and residuals of the host's, bit for bit but for factorisations; the host waits for no value."""
    bucket = GradBucket(0, FlatParams(tiny_models.model()).places, comm.size, comm.rank)
    here, there = parse(compress)(comm, bucket, 7), parse(compress)(comm, bucket, 7, cupy)
    tolerance = 2e-5 if compress.startswith("powersgd") else 0
    for step in range(3):
        x = gradient(comm, bucket, step)
        out, lost = np.empty_like(x), np.empty_like(x)
        found, missing, given = cupy.empty(len(x), np.float32), cupy.empty(len(x), np.float32), cupy.asarray(x)
        for requests in here.exchange(x, out, lost, step):
            wait_all(requests)
        gpu.log.clear()
        for requests in there.exchange(given, found, missing, step):
            wait_all(requests)
        assert not any(kind == "read" for kind, *_ in gpu.log)
        np.testing.assert_allclose(found.get(), out, rtol=0, atol=tolerance * comm.size)
        np.testing.assert_allclose(missing.get(), lost, rtol=0, atol=tolerance * comm.size)
    assert here.state().keys() == there.state().keys()
    here.close()
    there.close()


@pytest.mark.parametrize("count", [0, 256, 700])
def test_signs(gpu, count):
    """Of any number of elements, and of blocks that are not full: the host's bits."""
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    codec = SignCompressor(np.array([256, 200, 100])[: -(-count // 256)])
    wire, out = np.empty(codec.nbytes(count), np.uint8), np.empty(count, np.float32)
    bits, found = cupy.empty(codec.nbytes(count), np.uint8), cupy.empty(count, np.float32)
    for one, to, back in ((x, wire, out), (cupy.asarray(x), bits, found)):
        codec.encode(one, to)
        codec.decode(to, back)
        codec.add(to, back)
    np.testing.assert_array_equal(bits.get(), wire)
    np.testing.assert_array_equal(found.get(), out)


@families
def test_training(comm, compress):
    compresses_as_on_the_host(comm, compress)


def engine(comm, compress, **settings):
    settings = {"first_bytes": 1, "bucket_bytes": 5000, "device": "cuda", "compress": compress, **settings}
    return DataParallelEngine(
        tiny_models.model(), tiny_models.Squares(), comm, SGD(rate=0.05, momentum=0.9), Settings(**settings)
    )


def train(made, steps):
    return [made.step(tiny_models.batches(made.share(4), 0)).loss for _ in steps]


def weights(made):
    return {place.parameter.name: place.parameter.data.get() for place in made.flat.places}


@pytest.mark.parametrize("compress", ["sign", "powersgd:2"])
def test_restart(comm, compress, tmp_path_factory):
    """Residuals and factors go through a checkpoint, and training continues bit for bit."""
    folder = comm.bcast(str(tmp_path_factory.mktemp("here")) if comm.rank == 0 else None)
    with engine(comm, compress) as made:
        train(made, range(2))
        path = checkpoint_files.save(comm, Path(folder), 2, made.tensor_slices(), {"engine": made.state()})
        expected = train(made, range(2)), weights(made)
    with engine(comm, compress) as again:
        found = Checkpoint(comm, path)
        found.restore(again.tensor_slices())
        again.load(found.facts["engine"])
        again.refresh()
        resumed = train(again, range(2)), weights(again)
    assert resumed[0] == expected[0]
    for name, values in expected[1].items():
        np.testing.assert_array_equal(resumed[1][name], values)


@families
def test_a_gradient_that_is_not_finite(comm, compress):
    """Nothing is updated, residuals and factors are as before, and the next step succeeds."""
    with engine(comm, compress) as made:
        train(made, range(2))
        before = weights(made)
        owed = [reducer.residual.get() for reducer in made._gradients.reducers if reducer.residual is not None]
        mine = tiny_models.batches(made.share(comm.size), 1)
        huge = [(number, x, np.full_like(y, 3e38 if number == 0 else 1), samples) for number, x, y, samples in mine]
        with pytest.raises(StepFailed), np.errstate(all="ignore"):
            made.step(huge)
        for name, values in weights(made).items():
            np.testing.assert_array_equal(values, before[name])
        left = [reducer.residual.get() for reducer in made._gradients.reducers if reducer.residual is not None]
        for one, other in zip(owed, left, strict=True):
            np.testing.assert_array_equal(one, other)
        assert all(np.isfinite(train(made, range(2))))


@families
def test_host_waits_of_a_step(comm, gpu, compress):
    """As many as without compression."""

    def reads(name):
        with engine(comm, name) as made:
            train(made, range(1))
            gpu.log.clear()
            train(made, range(1))
            return sum(kind == "read" for kind, *_ in gpu.log)

    assert reads(compress) == reads("none") > 0


def test_auto_is_refused(comm):
    with pytest.raises(ValueError, match=r"compress: expected none or one of int8, .* on cuda, since auto times the"):
        engine(comm, "auto")


@pytest.mark.parametrize("rows", [[9], [40, 5, 40], []])
@pytest.mark.parametrize("columns", [1, 3])
def test_factorisation(gpu, rows, columns):
    """As LAPACK's, also of columns of zeros and of equal ones, of huge and of tiny numbers; NaN stays in its matrix."""
    random = np.random.default_rng(columns)
    matrices = [random.standard_normal((length, columns)).astype(np.float32) for length in rows]
    for matrix in matrices:
        matrix *= np.float32(10.0) ** random.integers(-38, 37, columns)
    if len(rows) == 3:
        matrices[0][:, -1] = 0
        matrices[1][2] = np.nan
    found = [sys.modules["cupy"].asarray(matrix) for matrix in matrices]
    orthonormalize(found)
    orthonormalize(matrices)
    for one, other in zip(found, matrices):
        if np.isfinite(other).all():
            np.testing.assert_allclose(one.get(), other, atol=1e-5)
        else:
            assert not np.isfinite(one.get()).all()


@pytest.mark.parametrize("compress", ["int8", "topk:0.05", "powersgd:2"])
def test_ranks_that_share_a_gpu(gpu, world, compress):
    """Its kernels read the encoded bytes where other ranks have them; the results are those of the host."""
    if world.size == 1:
        pytest.skip("needs two processes")
    works = cupy.Engine(gpu, world.rank)
    with Communicator(world, cuda_aware=False) as comm:
        assert comm.device_transfer == "kernel"
        compresses_as_on_the_host(comm, compress)
        world.Barrier()
    works.stop()
