"""Wrong command lines end on all ranks with one line and status 2 or 1, without a traceback, and damage no file."""

import pytest
from mpi_launches import Launch
from support.launches import MPIEXEC, needs_mpiexec
from support.wrong_command_lines import MAKERS

from parallel.cli.programs import PROGRAMS

CASES = [(name, ranks) for name, program in PROGRAMS.items() for ranks in ((1, 2) if program.mpi else (1,))]


def problem(ends):
    """What is wrong with the ends of a command line on all ranks; None if nothing."""
    (status, *others), lines = [end["status"] for end in ends], []
    for end in ends:
        lines += [line for line in end["errors"].splitlines() if line.strip()]
    if status not in (0, 1, 2) or any(other != status for other in others):
        return "statuses"
    if any(word in line for line in lines for word in ("Traceback", "Abort", "Warning")):
        return "no line but a traceback"
    if status == 2 and (len(lines) != 1 or "error: " not in lines[0]):
        return "not one line"
    if status == 1 and sum("error: " in line for line in lines) > 1:  # or none, but a verdict in the output
        return "several lines"
    if status and any(end["changed"] for end in ends):
        return "damaged files"
    return None


def check(folder, ranks, count, programs):
    launch = Launch(MPIEXEC, ranks, "support.wrong_command_lines", folder)
    status, output = launch.run([str(count), *programs], limit=120 + 4 * count * len(programs))
    lines = [launch.lines(rank) for rank in range(ranks)]
    assert status == 0, (lines[0][-1:], output)
    ends = list(zip(*([line for line in its if "status" in line] for its in lines)))
    assert [end[0]["status"] for end in ends[: len(MAKERS)]] == [0] * len(MAKERS), ends[: len(MAKERS)]
    wrong = [(found, end) for end in ends if (found := problem(end))]
    assert not wrong, f"{len(wrong)} of {len(ends)}: {wrong[:5]}"


@needs_mpiexec
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [1, 2])
def test_some_of_every_program(ranks, tmp_path):
    check(tmp_path, ranks, 1, [name for name, number in CASES if number == ranks])


@needs_mpiexec
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, ranks", CASES)
def test_many(name, ranks, tmp_path):
    check(tmp_path, ranks, 100, [name])
