"""Calls found by their arguments without the compiled engine: blocking and non-blocking, v-forms included."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.engine.instructions import REFUSED
from collectives.errors import Mismatch, RanksDisagree
from collectives.runtime import compiled_program
from collectives.runtime.requests import Request
from collectives.transport.mailbox import NONBLOCKING


@pytest.fixture
def comm(world, monkeypatch):
    """Communicator whose calls are not compiled."""
    monkeypatch.setattr(compiled_program, "available", lambda: False)
    with Communicator(world) as made:
        yield made


def case(name, rank, size):
    """Arguments of a call, the array that is sent with its values, and the result with its expected values."""
    counts = [1 + block for block in range(size)]
    own, all_blocks = np.zeros(counts[rank]), np.zeros(sum(counts))
    owners = np.repeat(np.arange(size) + 1.0, counts)
    if name == "Allreduce":
        return (own[:1], all_blocks[:1]), (own, rank + 1.0), (all_blocks[:1], [size * (size + 1) / 2])
    if name == "Scatterv":
        return ([all_blocks, counts], own), (all_blocks, owners), (own, own + rank + 1)
    expected = owners if name == "Allgatherv" or rank == 0 else None
    return (own, [all_blocks, counts]), (own, rank + 1.0), (all_blocks, expected)


@pytest.mark.parametrize("name", ["Allreduce", "Allgatherv", "Gatherv", "Scatterv"])
def test_found_by_arguments(comm, name):
    arguments, (sent, values), (result, expected) = case(name, comm.Get_rank(), comm.Get_size())
    sent[:] = values
    key = name, *arguments, MPI.SUM, 0, "auto", None
    for _ in range(4 * NONBLOCKING):
        getattr(comm, name)(*arguments)
        getattr(comm, f"I{name.lower()}")(*arguments).Wait()
    for start in (lambda: comm._run_cached(REFUSED, *key), lambda: comm._start_cached(REFUSED, *key)):
        result[:] = 0
        found = start()
        assert found == () or isinstance(found, Request)
        if found:
            found.Wait()
        if expected is not None:
            assert result.tolist() == list(expected)


def test_arrays_at_other_addresses(comm):
    """A program bound to memory is not used for other arrays like it."""
    counts = [2] * comm.Get_size()
    for turn in range(4 * NONBLOCKING):
        x, y = np.full(2, turn), np.empty((comm.Get_size(), 2), int)
        comm.Iallgatherv(x, [y, counts]).Wait()
        assert (y == turn).all()
        comm.Allgatherv(-x, [y, counts])
        assert (y == -turn).all()


@pytest.mark.skipif(MPI.COMM_WORLD.Get_size() != 2, reason="a third rank would wait for messages that are not sent")
def test_ranks_disagree(comm):
    """The call of another operation is refused as it starts or in its wait, and so are all later ones."""
    x, y = np.ones(3), np.zeros(3)
    for _ in range(4 * NONBLOCKING):
        comm.Iallreduce(x, y, MPI.SUM).Wait()
        comm.Iallreduce(x, y, MPI.MAX).Wait()
    with pytest.raises(Mismatch):
        comm.Iallreduce(x, y, MPI.SUM if comm.Get_rank() % 2 else MPI.MAX).Wait()
    with pytest.raises(RanksDisagree):
        comm.Iallreduce(x, y)
