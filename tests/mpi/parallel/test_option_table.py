"""Cells of the option table under MPI: layouts that threads cannot run, and some of the others."""

import zlib
from pathlib import Path

import pytest
from support.differential.cells import Cell, outcome, problem
from support.differential.columns import COLUMNS
from support.differential.rows import ROWS
from support.differential.rules import NOT_HELD

pytestmark = pytest.mark.ranks(1, 2, 3)

SAMPLE = {False: 8, True: 1}
"""Rows of a column in the default tier, by whether threads can run it."""


def cells(column, count=None):
    """Cells of a column, or some of them: the same in every run, and those that need MPI first."""
    every = [Cell(row, row.task(column), column) for row in ROWS if row.fits(column)]
    every = [cell for cell in every if NOT_HELD not in cell.row.refusals_of(cell.task, column)]  # they end the job
    every.sort(key=lambda cell: (not cell.row.needs_mpi, zlib.crc32(str(cell).encode())))
    return every[:count]


def checked(cell, found):
    """Text of what is wrong, on the one rank that checks: an error of its own too."""
    try:
        return problem(cell, found)
    except Exception as error:
        return f"the reference raises {type(error).__name__}: {error}"


def run(comm, some, folder):
    """Run cells on all ranks; all have the text of what is wrong."""
    texts = []
    for number, cell in enumerate(some):
        found = comm.gather(outcome(cell, comm, Path(comm.bcast(str(folder)), str(number))))
        text = checked(cell, found) if comm.rank == 0 else ""
        texts += [f"{cell}: {text}"] if text else []
    assert not comm.bcast("\n".join(texts))


@pytest.mark.parametrize("column", COLUMNS, ids=str)
def test_cells(comm, column, tmp_path):
    if column.ranks != comm.size:
        pytest.skip(f"for {column.ranks} ranks")
    run(comm, cells(column, SAMPLE[column.threads]), tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("column", [column for column in COLUMNS if not column.threads], ids=str)
def test_all_cells(comm, column, tmp_path):
    if column.ranks != comm.size:
        pytest.skip(f"for {column.ranks} ranks")
    run(comm, cells(column), tmp_path)
