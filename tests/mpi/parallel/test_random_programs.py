"""Random programs on processes, also in layouts that threads cannot run, and with ranks that leave the program."""

from pathlib import Path

import pytest
from support.differential.columns import COLUMNS
from support.differential.random_programs import draw, outcome, problem

pytestmark = pytest.mark.ranks(2, 3)

WHOLE, SAMPLE = 40, 8
"""Programs with the marker `full`, and those of the default tier."""


def run(comm, seeds, folder):
    """Run programs on all ranks; all have the text of what is wrong."""
    columns = [column for column in COLUMNS if column.ranks == comm.size]
    if not columns:
        pytest.skip(f"no column has {comm.size} ranks")
    texts = []
    for seed in seeds:
        program = draw(seed, columns, faulty=0.8, leaving=True)
        found = comm.gather(outcome(program, comm, Path(comm.bcast(str(folder)), str(seed))))
        text = problem(program, found) if comm.rank == 0 else ""
        texts += [f"{program}: {text}"] if text else []
    assert not comm.bcast("\n".join(texts))


@pytest.mark.timeout(120)
def test_programs(comm, tmp_path):
    run(comm, range(WHOLE, WHOLE + SAMPLE), tmp_path)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_all_programs(comm, tmp_path):
    run(comm, range(WHOLE), tmp_path)
