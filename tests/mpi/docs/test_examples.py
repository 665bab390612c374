"""Programs of docs/examples: their own checks hold on any number of ranks."""

import importlib
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = sorted(path.stem for path in Path(__file__).parents[3].glob("docs/examples/*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs(comm, capsys, name):
    """The checks in its `main` hold, and only rank 0 prints."""
    importlib.import_module(name).main(comm)
    assert bool(capsys.readouterr().out) == (comm.Get_rank() == 0)


def test_power_iteration_on_a_device(comm, gpu, capsys):
    importlib.import_module("power_iteration").main(comm)
    assert ("cupy" in capsys.readouterr().out) == (comm.Get_rank() == 0)


@pytest.mark.parametrize("empty", ["none", "first", "all"])
def test_sample_sort_of_equal_and_missing_numbers(comm, empty):
    sort, rank = importlib.import_module("sample_sort"), comm.Get_rank()
    count = 0 if empty == "all" or (empty == "first" and rank == 0) else 5 + rank
    numbers = np.arange(count) % 3
    found, given = comm.allgather(sort.sample_sort(comm, numbers)), comm.allgather(numbers)
    np.testing.assert_array_equal(np.concatenate(found), np.sort(np.concatenate(given)))
