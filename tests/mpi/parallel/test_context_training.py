"""Training with sequences divided over the ranks: the same bits as one rank, by the engine of data parallelism."""

import numpy as np
import pytest
from mpi4py import MPI
from support.training_states import differing, whole

from collectives import Communicator
from parallel.context.divide_model import divide, divided_batches
from parallel.context.sequence_division import SequenceDivision
from parallel.data.sampler import Batch
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.mesh.device_mesh import DeviceMesh
from parallel.mesh.mesh import Mesh
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.optim.optimizers import AdamW

LENGTH = 32


def batches(step, numbers):
    """Micro-batches of two sequences each."""
    for number in numbers:
        tokens = np.random.default_rng([step, number]).integers(0, 64, (2, LENGTH + 1))
        yield Batch(number, tokens[:, :-1], tokens[:, 1:], np.arange(2) + 2 * number)


def trained(comm, mesh, steps, layout="dp", *, parts, micro_batches, **settings):
    """State and losses after some steps on this mesh of dp and cp."""
    with DeviceMesh(comm, mesh) as device:
        axis, replica = device.axis("cp"), device.coordinates["dp"]
        division = SequenceDivision("zigzag", LENGTH, axis.size, parts)
        model = divide(build("gpt:tiny", (LENGTH,), 64, dropout=0.1), axis, division, "allgather")
        settings = Settings(layout=layout, first_bytes=1, bucket_bytes=50_000, **settings)
        losses = []
        with DataParallelEngine(model, SoftmaxCrossEntropy(), comm, AdamW(lr=0.01), settings) as engine:
            for step in range(steps):
                mine = batches(step, range(replica, micro_batches, mesh.sizes["dp"]))
                losses.append(engine.step(divided_batches(mine, axis, division)).loss)
            return whole(comm, engine), losses


def same_as_one_rank(comm, mesh, steps, layout, **settings):
    settings |= {"reproducible": True, "clip": 1.0}
    with Communicator(MPI.COMM_SELF) as alone:
        expected, expected_losses = trained(alone, Mesh({"dp": 1, "cp": 1}), steps, **settings)
    found, losses = trained(comm, mesh, steps, layout, **settings)
    assert not differing(found, expected)
    assert losses == pytest.approx(expected_losses, rel=1e-14)


@pytest.mark.parametrize("layout, precision", [("dp", "fp32"), ("zero3", "bf16")])
def test_same_bits_as_one_rank(comm, layout, precision):
    """Two parts of the sequence on each rank, and one micro-batch: any number of ranks."""
    size = comm.Get_size()
    mesh = Mesh({"dp": 1, "cp": size})
    same_as_one_rank(comm, mesh, 2, layout, parts=2 * size, micro_batches=1, precision=precision)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout, precision", [("dp", "fp32"), ("dp", "bf16"), ("zero1", "fp32"), ("zero3", "fp32")])
def test_same_bits_with_replicas(comm, layout, precision):
    """A power of two of ranks for each sequence, several micro-batches, twenty steps."""
    size = comm.Get_size()
    cp = max(ranks for ranks in (1, 2, 4) if size % ranks == 0)
    mesh = Mesh({"dp": size // cp, "cp": cp})
    same_as_one_rank(comm, mesh, 20, layout, parts=4, micro_batches=2, precision=precision)
