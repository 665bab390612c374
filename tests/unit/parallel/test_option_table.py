"""Every public option on every layout and mesh: the result of one rank, and of PyTorch, or a refusal."""

import zlib
from collections import Counter

import numpy as np
import pytest
from conformance import thread_meeting
from conformance.thread_communicator import run_threads
from support.differential.cells import Cell, difference, outcomes_on_threads, problem, reference
from support.differential.columns import COLUMNS, Column
from support.differential.coverage import options_in_use, public_options
from support.differential.rows import ROWS
from support.differential.torch_twin import TorchPlayer

CELLS = {
    row.name: [Cell(row, row.task(column), column) for column in COLUMNS if column.threads and row.fits(column)]
    for row in ROWS
    if not row.needs_mpi
}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Ranks that wait for so many seconds for each other have lost each other."""
    monkeypatch.setattr(thread_meeting, "PATIENCE", 30.0)


def sample():
    """Cells of the default tier: of every row one that trains, in the column with the fewest, and one refused."""
    taken, chosen = Counter(), {}
    for name, cells in CELLS.items():
        chosen[name] = []
        for is_refused in (False, True):
            some = [cell for cell in cells if bool(cell.row.refusals_of(cell.task, cell.column)) == is_refused]
            if some:
                one = min(some, key=lambda cell: (taken[is_refused, str(cell.column)], zlib.crc32(str(cell).encode())))
                taken[is_refused, str(one.column)] += 1
                chosen[name].append(one)
    return chosen


SAMPLE = sample()


def problems(cells):
    found = {str(cell): problem(cell, outcomes_on_threads(cell)) for cell in cells}
    return "\n".join(f"{name}: {text}" for name, text in found.items() if text)


@pytest.mark.parametrize("name", CELLS)
def test_cells(name):
    assert not problems(SAMPLE[name])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CELLS)
def test_all_cells(name):
    assert not problems(CELLS[name])


def test_the_table_is_large():
    trained = [cell for cells in CELLS.values() for cell in cells if not cell.row.refusals_of(cell.task, cell.column)]
    assert len(trained) >= 1500
    every = {str(column) for column in COLUMNS if column.threads}
    assert {str(cell.column) for cell in trained} == every
    assert {str(cell.column) for cells in SAMPLE.values() for cell in {*cells} & {*trained}} == every


def test_every_public_option_is_in_the_table(tmp_path):
    (used,) = run_threads(1, lambda comm: options_in_use(comm, tmp_path))
    assert sorted(public_options() - used) == []


IN_TORCH = {
    row.name: row
    for row in ROWS
    if row.in_torch
    and not row.needs_mpi
    and any(task.twin and not row.refusals_of(task, Column(1, {"layout": "dp"})) for task in row.tasks)
}


@pytest.mark.parametrize("name", IN_TORCH)
def test_one_rank_is_pytorch(name):
    """With float64; cells compare with one rank."""
    torch, row = pytest.importorskip("torch"), IN_TORCH[name]
    for task in (task for task in row.tasks if task.twin):
        expected = TorchPlayer(torch, task, row.optimizer, dict(row.settings), samples=8).play(row.program)
        found = reference(Cell(row, task, Column(1, {"layout": "dp"})))
        assert isinstance(found, list), found
        values = {one.name: one.value for one in expected}
        assert not difference([one for one in found if one.name in values], expected, max(row.tolerance, 1e-7)), (
            task.name
        )
        assert all(np.ndim(one.value) == 0 or one.name in values for one in found)
