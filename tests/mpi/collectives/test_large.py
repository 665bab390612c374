"""Messages of more than 2 GiB, whose lengths do not fit in 32 bits."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.transport.memory.memory_limits import available_memory

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

LENGTH = (1 << 31) - (1 << 31) % 840 + 840 * 3
"""Bytes: blocks of equal length for up to 8 ranks."""

MARKED = (0, 1, (1 << 31) - 1, 1 << 31, LENGTH - 1)
"""Places of the bytes that are not zero."""


@pytest.fixture(params=["shared memory", "messages"])
def own(request, world):
    needed = 3 * LENGTH * world.Get_size()
    if world.allreduce(available_memory() or 0, MPI.MIN) < needed:
        pytest.skip(f"needs {needed >> 30} GiB of memory")
    with Communicator(world, shared=request.param == "shared memory") as comm:
        yield comm


def marked(value):
    array = np.zeros(LENGTH, np.uint8)
    array[list(MARKED)] = value
    return array


def check(array, value):
    assert (array[list(MARKED)] == value).all()
    assert np.count_nonzero(array) == len(MARKED)


def test_bcast(own):
    root = own.Get_size() - 1
    array = marked(7) if own.Get_rank() == root else np.zeros(LENGTH, np.uint8)
    own.Bcast(array, root)
    check(array, 7)


def test_allreduce_in_place(own):
    array = marked(own.Get_rank() + 1)
    own.Iallreduce(MPI.IN_PLACE, array).Wait()
    check(array, own.Get_size() * (own.Get_size() + 1) // 2)


def test_allgather(own):
    rank, size = own.Get_rank(), own.Get_size()
    block = LENGTH // size
    mine, whole = marked(9)[rank * block : (rank + 1) * block].copy(), np.zeros(block * size, np.uint8)
    own.Allgather(mine, whole)
    expected = [place for place in MARKED if place < block * size]
    assert (whole[expected] == 9).all() and np.count_nonzero(whole) == len(expected)


def test_gatherv_of_one_long_block(own):
    """Ranks other than the root do not know the length of the block."""
    rank, size = own.Get_rank(), own.Get_size()
    counts = [LENGTH if one == size - 1 else 0 for one in range(size)]
    mine = marked(5) if rank == size - 1 else np.zeros(0, np.uint8)
    whole = np.zeros(LENGTH, np.uint8)
    own.Gatherv(mine, [whole, counts] if rank == 0 else None)
    if rank == 0:
        check(whole, 5)
