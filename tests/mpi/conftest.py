"""Tests for any number of ranks: ``mpiexec -n 3 python -m pytest --with-mpi tests/mpi``."""

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest-mpi looks for the marker
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.mpi)
