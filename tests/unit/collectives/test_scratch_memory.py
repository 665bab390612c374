"""Scratch memory that the programs of blocking calls share."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives.runtime.execution.program_memory import SHARED_SCRATCH, ScratchMemory
from collectives.transport.memory.shared_heap import LINE


def test_arrays_of_a_program_are_apart_and_programs_use_the_same():
    scratch = ScratchMemory()
    (one, two), own = scratch.arrays((3, 5), np.dtype(np.float32))
    assert own == 0 and (one.array.size, two.array.size) == (3, 5)
    assert one.address % LINE == 0 and two.address >= one.address + 12
    assert [each.address for each in (one, two)] == [MPI.Get_address(each.array) for each in (one, two)]
    one.array[:], two.array[:] = 1, 2
    (again, _), _ = scratch.arrays((3, 1), np.dtype(np.float32))
    assert again.address == one.address and (again.array == 1).all() and (two.array == 2).all()


def test_a_longer_program_leaves_the_memory_of_others_alone():
    scratch = ScratchMemory()
    (short, _), _ = scratch.arrays((100, 0), np.dtype(np.uint8))
    short.array[:] = 7
    (long, _), own = scratch.arrays((10_000, 1), np.dtype(np.int64))
    long.array[:] = 0
    assert own == 0 and (short.array == 7).all()


def test_more_than_programs_share_is_a_program_s_own():
    scratch = ScratchMemory()
    count = SHARED_SCRATCH // 8
    for length, expected in ((count, 0), (count + 1, 8 * (count + 1))):
        (array, empty), own = scratch.arrays((length, 0), np.dtype(np.float64))
        assert (array.array.size, empty.array.size, own) == (length, 0, expected)


@pytest.mark.parametrize("dtype", [np.dtype("V3"), np.dtype([("value", "f8"), ("at", "i4")]), np.dtype(np.complex128)])
def test_any_type(dtype):
    (one, two), _ = ScratchMemory().arrays((2, 3), dtype)
    assert (one.array.dtype, one.array.nbytes, two.array.nbytes) == (dtype, 2 * dtype.itemsize, 3 * dtype.itemsize)
