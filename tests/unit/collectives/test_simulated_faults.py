"""Faults of one of 2 to 4 simulated ranks: causes that the records give name its rank, its call and its line."""

import pytest
from simulated_faults import SimulatedRun, wrong

from collectives.cli.faults import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_causes_name_the_fault(kind):
    noted = 0
    for seed in range(120):
        run = SimulatedRun(seed, (kind,))
        found = run.run()
        assert not (problem := wrong(run, found)), (seed, problem, run.fault, found)
        noted += bool(found)
    assert noted > 60 or (kind == "corrupt" and not noted)
