"""Memory accesses of compiled code."""

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from collectives.runtime import cell_copy  # noqa: E402
from collectives.runtime.kernel_memory import (  # noqa: E402
    BLOCK_BYTES,
    LONG_COPY,
    STREAMED,
    _copy_blocks,
    copy_bytes,
    stream_bytes,
)
from collectives.transport import mailbox  # noqa: E402
from collectives.transport.copy_speed import IS_X86  # noqa: E402


@numba.njit
def stream(target, source, nbytes):
    stream_bytes(target, source, nbytes)


@numba.njit
def copy(target, source, nbytes):
    copy_bytes(target, source, nbytes)


@numba.njit
def copy_in_loop(target, source, nbytes):
    _copy_blocks(target, source, nbytes, False)


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 100, LONG_COPY, 5000])
@pytest.mark.parametrize("copy", [stream, copy, copy_in_loop], ids=["past caches", "through caches", "in a loop"])
def test_copied_bytes_at_any_alignment(copy, nbytes):
    source, target = np.arange(6000).astype(np.uint8), np.empty(6000, np.uint8)
    for before in range(0, 2 * BLOCK_BYTES, 5):
        for skipped in (0, 1, 8):
            target[:] = 255
            copy(target.ctypes.data + before, source.ctypes.data + skipped, nbytes)
            assert (target[before : before + nbytes] == source[skipped : skipped + nbytes]).all()
            assert (target[:before] == 255).all() and (target[before + nbytes :] == 255).all()


@pytest.mark.parametrize("nbytes", [STREAMED - 1, STREAMED, STREAMED + 1])
def test_copied_bytes_of_long_arrays(nbytes):
    source = np.random.default_rng(0).integers(0, 256, nbytes + 1, np.uint8)
    target = np.full(nbytes + 5, 255, np.uint8)
    copy(target.ctypes.data + 3, source.ctypes.data + 1, nbytes)
    assert (target[3:-2] == source[1:]).all() and (target[:3] == 255).all() and (target[-2:] == 255).all()


@pytest.mark.parametrize("until_probe", [-1, 0, 5] if IS_X86 else [-1])
@pytest.mark.parametrize("nbytes", [1, cell_copy.PROBE, 3 * cell_copy.PROBE - 1, 3 * cell_copy.PROBE, 20000])
@pytest.mark.parametrize("past", [0, 1])
def test_pieces_in_cells_are_whole(until_probe, nbytes, past):
    numbers = np.zeros(mailbox.OUR_SEGMENTS, np.int64)
    numbers[mailbox.UNTIL_PROBE], numbers[mailbox.PAST_CACHES] = until_probe, past
    source, target = np.arange(nbytes).astype(np.uint8), np.full(nbytes + 1, 255, np.uint8)
    cell_copy.copy_into_cell(numbers.ctypes.data, target.ctypes.data, source.ctypes.data, nbytes)
    assert (target[:-1] == source).all() and target[-1] == 255
    probed = until_probe == 0 and nbytes >= 3 * cell_copy.PROBE
    expected = mailbox.PROBE_EVERY if probed else max(until_probe - 1, min(until_probe, 0))
    assert numbers[mailbox.UNTIL_PROBE] == expected


@pytest.mark.parametrize("nbytes", [8, 100, mailbox.SPREAD - 1, mailbox.SPREAD, 3 * mailbox.SPREAD, 1 << 16])
def test_places_of_messages_do_not_overlap(nbytes):
    memory = mailbox.SlotMemory(np.empty(1 << 21, np.uint8), 64, 1 << 11, 1 << 9, 1 << 16, 1 << 16)
    starts = [memory.start(place, nbytes) for place in range(memory.period(nbytes))]
    assert len(starts) == mailbox.SLOTS * (1 if nbytes < mailbox.SPREAD else (1 << 16) // nbytes)
    assert (np.diff(sorted(starts)) >= nbytes).all() and max(starts) + nbytes <= memory.memory.size
    if nbytes > memory.short_bytes:
        for place, start in enumerate(starts):
            assert (start - memory.cell) // memory.cell_bytes == place % mailbox.SLOTS  # in the cell of its slot
