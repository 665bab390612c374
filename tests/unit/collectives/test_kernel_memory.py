"""Memory accesses of compiled code."""

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from collectives.runtime.kernel_memory import BLOCK_BYTES, stream_bytes  # noqa: E402


@numba.njit
def stream(target, source, nbytes):
    stream_bytes(target, source, nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 100, 5000])
def test_streamed_bytes_at_any_alignment(nbytes):
    source, target = np.arange(6000).astype(np.uint8), np.empty(6000, np.uint8)
    for before in range(0, 2 * BLOCK_BYTES, 5):
        for skipped in (0, 1, 8):
            target[:] = 255
            stream(target.ctypes.data + before, source.ctypes.data + skipped, nbytes)
            assert (target[before : before + nbytes] == source[skipped : skipped + nbytes]).all()
            assert (target[:before] == 255).all() and (target[before + nbytes :] == 255).all()
