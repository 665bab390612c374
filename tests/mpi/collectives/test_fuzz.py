"""Random sequences of calls in all forms and spellings, from one or two threads, give what the MPI's own give.

More of them: ``python scripts/fuzz.py``, which also shrinks those that fail.
"""

import pytest
from fuzzing.fuzz_rank import run
from fuzzing.sequences import sequence
from mpi4py import MPI
from support.tiers import default


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", default(range(6), 0, 1, 2))
def test_a_random_sequence_gives_what_the_mpi_gives(world, seed):
    threads = 2 if MPI.get_vendor()[0] == "MPICH" else 1  # others hang natively: scripts/fuzz.py --control
    calls, fault = run(world, seed, sequence(seed, threads, 40))
    assert calls > 20 * threads and not fault, f"seed {seed}, {threads} threads, {fault}"
