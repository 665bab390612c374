"""Data-parallel training is the training of one rank, bit for bit."""

import pytest

pytest.importorskip("sklearn")

from mpi4py import MPI

from collectives import Communicator
from parallel.cli.demo import first_difference, train


def test_all_ranks_train_as_one(comm):
    together, alone = train(comm, 3, "together"), train(Communicator(MPI.COMM_SELF), 3, "alone")
    assert first_difference(together, alone) is None
    assert together.score == alone.score and together.score.accuracy > 0.9
    assert [line["loss"] for line in together.lines] == [line["loss"] for line in alone.lines]


def test_a_difference_is_found(comm):
    one, other = train(comm, 1, "one"), train(comm, 1, "other")
    other.weights["1.0.bias"][3] += 1e-3
    assert first_difference(one, other) == "1.0.bias"
