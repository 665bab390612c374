"""Random sequences of calls in all forms and spellings, from one or two threads, give what the MPI's own give.

More of them: ``python scripts/fuzz.py``, which also shrinks those that fail.
"""

import pytest
from fuzzing.fuzz_rank import run
from fuzzing.sequences import Step, sequence
from fuzzing.step_runner import StepRunner
from mpi4py import MPI
from support.tiers import default


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", default(range(6), 0, 1, 2))
def test_a_random_sequence_gives_what_the_mpi_gives(world, seed):
    threads = 2 if MPI.get_vendor()[0] == "MPICH" else 1  # others hang natively: scripts/fuzz.py --control
    calls, fault = run(world, seed, sequence(seed, threads, 40))
    assert calls > 20 * threads and not fault, f"seed {seed}, {threads} threads, {fault}"


@pytest.mark.parametrize("replacing", ["copied op", "another function"])
def test_ranks_outside_of_a_communicator_drop_the_same_kept_calls(world, replacing):
    steps = [
        Step(0, 0, "create", pick=1),  # without the last rank
        Step(0, 1, "call", method="Reduce", form="kept", dtype="Q", op="add", n=3),
        Step(0, 2, "copied op", comm=1),
        Step(0, 3, "complete"),
    ]
    if replacing == "another function":
        steps[2] = steps[1]._replace(number=2, form="blocking", op="affine", comm=1)
    kept = []
    runner = StepRunner(world, 0, lambda step: kept.append([call.step.number for call in runner.kept]))
    runner.run(steps)
    assert kept == [[], [], [1], []]
