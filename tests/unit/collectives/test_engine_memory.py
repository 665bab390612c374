"""Copies of the compiled engine, and the places of messages in bounce buffers."""

import numpy as np
import pytest

from collectives.engine import instructions
from collectives.engine.extension import available, engine
from collectives.transport.node import mailbox

compiled = pytest.mark.skipif(not available(), reason="this installation has no compiled engine")

LONG, STREAMED = 1 << 11, 1 << 22
"""Bytes from which the engine copies by a loop, and by non-temporal stores, on some processors (``memory.c``)."""


@compiled
@pytest.mark.parametrize("nbytes", [0, 1, 31, 32, 33, 100, LONG - 1, LONG, LONG + 1, 5000])
def test_copied_bytes_at_any_alignment(nbytes):
    source, target = np.arange(6000).astype(np.uint8), np.empty(6000, np.uint8)
    for before in range(0, 64, 5):
        for skipped in (0, 1, 8):
            target[:] = 255
            engine.copy(target.ctypes.data + before, source.ctypes.data + skipped, nbytes)
            assert (target[before : before + nbytes] == source[skipped : skipped + nbytes]).all()
            assert (target[:before] == 255).all() and (target[before + nbytes :] == 255).all()


@compiled
@pytest.mark.parametrize("nbytes", [STREAMED - 1, STREAMED, STREAMED + 1])
def test_copied_bytes_of_long_arrays(nbytes):
    source = np.random.default_rng(0).integers(0, 256, nbytes + 1, np.uint8)
    target = np.full(nbytes + 5, 255, np.uint8)
    engine.copy(target.ctypes.data + 3, source.ctypes.data + 1, nbytes)
    assert (target[3:-2] == source[1:]).all() and (target[:3] == 255).all() and (target[-2:] == 255).all()


@compiled
def test_python_and_the_engine_have_the_same_structures():
    dtypes = {"Row": "ROW", "Operand": "OPERAND", "Stream": "STREAM", "Link": "LINK", "NetMessage": "NET_MESSAGE"}
    dtypes |= {"Check": "CHECK", "Scale": "SCALE", "CallRecord": "CALL_RECORD", "Frame": "FRAME_HEAD"}
    found = engine.layout()
    sizes = {name: getattr(instructions, dtype).itemsize for name, dtype in dtypes.items()}
    assert {name: found.pop(name) for name in sizes} == sizes
    for name, offset in found.items():
        owner, field = name.split(".")
        assert getattr(instructions, dtypes[owner]).fields[field][1] == offset, name


@pytest.mark.parametrize(
    "nbytes", [8, 100, instructions.SPREAD - 1, instructions.SPREAD, 3 * instructions.SPREAD, 1 << 16]
)
def test_places_of_messages_do_not_overlap(nbytes):
    memory = mailbox.SlotMemory(np.empty(1 << 21, np.uint8), 64, 1 << 11, 1 << 9, 1 << 16, 1 << 16)
    starts = [memory.start(place, nbytes) for place in range(memory.period(nbytes))]
    assert len(starts) == instructions.SLOTS * (1 if nbytes < instructions.SPREAD else (1 << 16) // nbytes)
    assert (np.diff(sorted(starts)) >= nbytes).all() and max(starts) + nbytes <= memory.memory.size
    if nbytes > memory.short_bytes:
        for place, start in enumerate(starts):
            assert (start - memory.cell) // memory.cell_bytes == place % instructions.SLOTS  # in the cell of its slot
