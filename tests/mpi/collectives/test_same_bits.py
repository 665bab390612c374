"""Results of an allreduce have the same bits on all ranks, whatever memory each of them presents."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms.catalog import CATALOG

LENGTHS = 1, 2, 7, 40, 600

CASES = "PROD F", "PROD D", "SUM F", "SUM f", "PROD d", "MAX d", "MIN f", "SUM e", "PROD e"


@pytest.fixture(params=["shared memory", "messages"])
def several(request, world):
    with Communicator(world, debug=False, shared=request.param == "shared memory", tuning=False) as comm:
        yield comm


def numbers(dtype, length, rng):
    """Ordinary numbers, and zeros, infinities and NaN of both signs."""
    if dtype.kind == "c":
        result = np.empty(length, dtype)
        result.real, result.imag = (numbers(result.real.dtype, length, rng) for _ in range(2))
        return result
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan])
    return np.where(rng.random(length) < 0.2, rng.choice(special, length), rng.standard_normal(length)).astype(dtype)


def presented(array, rank, turn):
    """Copy of the array as this rank presents it: aligned to a cache line, to an element, or not at all."""
    memory = np.zeros(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + (0, array.itemsize, 1)[(rank + turn) % 3]
    view = memory[start : start + array.nbytes].view(array.dtype)
    view[...] = array
    return view


@pytest.mark.timeout(120)
@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("algorithm", [name for name, entry in CATALOG["allreduce"].items() if entry.alike])
@pytest.mark.parametrize("case", CASES)
def test_all_algorithms(several, case, algorithm, in_place):
    """In the first turns programs are not compiled, in the last ones they are if they can be."""
    comm, (name, char) = several, case.split()
    op, dtype = getattr(MPI, name), np.dtype(char)
    rank, rng = comm.Get_rank(), np.random.default_rng(comm.Get_rank())
    with np.errstate(all="ignore"):
        for turn in range(20):
            for length in LENGTHS[: 5 if turn in (0, 19) else 1]:
                mine = presented(numbers(dtype, length, rng), rank, turn)
                total = presented(mine if in_place else np.zeros(length, dtype), rank, turn + 1)
                comm.Allreduce(MPI.IN_PLACE if in_place else mine, total, op, algorithm=algorithm)
                bits = total.tobytes()
                assert MPI.Intracomm(comm).bcast(bits) == bits, f"turn {turn}, {length} elements"
