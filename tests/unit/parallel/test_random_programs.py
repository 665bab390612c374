"""Random programs on threads as ranks, many with a fault of one rank: right, or an error on all ranks."""

import pytest
from conformance import thread_meeting
from support.differential.columns import COLUMNS
from support.differential.random_programs import draw, outcomes_on_threads, problem

ON_THREADS = [column for column in COLUMNS if column.threads and column.ranks <= 4]
WHOLE, EACH, SAMPLE = 1000, 50, 20
"""Programs with the marker `full`, programs of a test, and those of the default tier."""


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Ranks that wait for so many seconds for each other have lost each other."""
    monkeypatch.setattr(thread_meeting, "PATIENCE", 30.0)


def problems(seeds):
    programs = [draw(seed, ON_THREADS) for seed in seeds]
    found = {str(program): problem(program, outcomes_on_threads(program)) for program in programs}
    return "\n".join(f"{name}: {text}" for name, text in found.items() if text)


@pytest.mark.timeout(300)
def test_programs():
    assert not problems(range(WHOLE, WHOLE + SAMPLE))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, WHOLE, EACH))
def test_all_programs(first):
    assert not problems(range(first, first + EACH))
