"""Tests on a real GPU: scripts/gpu_check runs them; without CuPy or a GPU they are skipped and say why."""

from pathlib import Path

import pytest


def missing():
    """What stands in the way of a CuPy array on a GPU, or None."""
    try:
        import cupy
    except ImportError as error:
        return f"no CuPy ({error})"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "CuPy finds no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU ({error})"


@pytest.hookimpl(tryfirst=True)  # before pytest-mpi looks for the marker
def pytest_collection_modifyitems(items):
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    reason = missing() if here else None
    for item in here:
        item.add_marker(pytest.mark.mpi)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
