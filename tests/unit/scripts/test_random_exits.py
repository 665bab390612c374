"""Random programs in which the process of one rank ends: the others raise an error that names it, or the job ends."""

import os
import re
import sys
import time

import pytest
from support.differential import exits
from support.differential.random_programs import LONGEST
from support.launches import ended, needs_mpiexec, start_ranks
from support.tiers import default

pytestmark = [needs_mpiexec, pytest.mark.timeout(120)]


@pytest.mark.parametrize("how", default(exits.ENDS, "os._exit in a step"))
@pytest.mark.parametrize("seed", default([1, 2, 3], 1))
def test_a_process_that_ends(how, seed):
    process = start_ranks(3, ["-m", exits.__name__, seed, how], PYTHONPATH=os.pathsep.join(sys.path))
    text = ended(process)
    last = time.monotonic()
    (first,) = re.findall(r"^end ([\d.]+)$", text, re.MULTILINE)
    errors = re.findall(r"^error ([\d.]+) (.*)$", text, re.MULTILINE)
    if how == "sys.exit":
        assert len(errors) == 2 and all("rank 2 has left the engine: SystemExit: 3" in error for _, error in errors), (
            text
        )
        last = max(float(moment) for moment, _ in errors)
    assert process.returncode, text
    assert last - float(first) < LONGEST, text
