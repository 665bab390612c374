"""Tests with CuPy itself, without a GPU; only with ``--real-cupy``, since the process then reaches no GPU."""

from pathlib import Path

import pytest
from support import cupy_without_driver


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    reason = None if config.getoption("--real-cupy") else "needs --real-cupy, CuPy and NVRTC; see docs/how-to/gpu.md"
    for item in here:
        item.own_markers = [marker for marker in item.own_markers if marker.name != "full"]
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def installed():
    pytest.importorskip("cupy_backends", reason="pip install cupy-cuda13x nvidia-cuda-nvrtc")
    return cupy_without_driver.install()


@pytest.fixture
def cupy(installed):
    """CuPy on host memory, which builds its kernels but launches none."""
    yield installed
    failures, cupy_without_driver.FAILURES[:] = list(cupy_without_driver.FAILURES), []
    assert not failures


KERNELS = {}


@pytest.fixture(scope="session")
def kernel_report():
    """(registers, bytes spilled) for each architecture by (kernel, source)."""
    return KERNELS


def pytest_terminal_summary(terminalreporter):
    if KERNELS:
        terminalreporter.section("registers / bytes spilled, for sm_80, sm_90 and sm_100")
        for name, found in sorted({(name, tuple(found)) for (name, _), found in KERNELS.items()}):
            terminalreporter.line(f"{name:100} " + "  ".join(f"{used:3} / {spilled}" for used, spilled in found))
