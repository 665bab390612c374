"""Data-parallel training is the training of one rank, whatever the shards."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

from mpi4py import MPI

from collectives import Communicator
from demo_digits import GOAL, load, loss_and_gradient, train


def test_shards_of_any_length_train_as_one(world, comm):
    """Rank r holds a share that grows with r: the mean is over images, not over ranks."""
    training, test = load()
    rank, size = world.Get_rank(), world.Get_size()
    owner = np.sort(np.arange(len(training)) % (size * (size + 1) // 2))
    owner = np.searchsorted(np.cumsum(np.arange(1, size + 1)), owner, side="right")
    positions = np.flatnonzero(owner == rank)
    together = train(comm, training.take(positions), positions, len(training), test, epochs=15)
    alone = train(
        Communicator(MPI.COMM_SELF), training, np.arange(len(training)), len(training), test, epochs=15
    )
    np.testing.assert_allclose(together.weights, alone.weights, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(together.losses, alone.losses, rtol=1e-9)
    assert together.accuracies == alone.accuracies
    assert together.accuracies[-1] >= GOAL


def test_gradient_is_that_of_the_loss():
    part = load()[0].take(slice(0, 20))
    rng = np.random.default_rng(0)
    weights, direction = rng.normal(size=(2, 65, 10))
    gradient, unused = np.empty((2, 65, 10))
    loss_and_gradient(weights, part, gradient)
    ahead = loss_and_gradient(weights + 1e-6 * direction, part, unused)
    behind = loss_and_gradient(weights - 1e-6 * direction, part, unused)
    assert np.isclose((ahead - behind) / 2e-6, (gradient * direction).sum(), rtol=1e-6)
