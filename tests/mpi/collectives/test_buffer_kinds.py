"""Buffers of all kinds are found by the arguments of a call, and hold its results."""

import ctypes
import mmap
from array import array

import numpy as np
import pytest
from mpi4py import MPI
from support.engines import find

from collectives import Communicator
from collectives.engine.extension import available
from collectives.transport.node.mailbox_layout import NONBLOCKING

pytestmark = pytest.mark.ranks(1, 2)

N = 64


class Subclass(np.ndarray):
    """Array of a class of one's own."""


def tensor():
    torch = pytest.importorskip("torch")
    return torch.ones(N, dtype=torch.float64)


KINDS = {
    "array": lambda: np.ones(N),
    "matrix": lambda: np.ones((8, N // 8)),
    "subclass": lambda: np.ones(N).view(Subclass),
    "array in a list": lambda: [np.ones(N), N, MPI.DOUBLE],
    "bytearray": lambda: [bytearray(8 * N), MPI.DOUBLE],
    "mmap": lambda: [mmap.mmap(-1, 8 * N), MPI.DOUBLE],
    "array.array": lambda: array("d", [1.0] * N),
    "ctypes": lambda: (ctypes.c_double * N)(),
    "memoryview": lambda: memoryview(np.ones(N)),
    "MPI's memory": lambda: [MPI.buffer.allocate(8 * N), MPI.DOUBLE],
    "tensor": tensor,
}


def values(buffer):
    """The buffer as an array of numbers."""
    memory = buffer[0] if isinstance(buffer, list) else buffer
    return memory.numpy() if hasattr(memory, "numpy") else np.frombuffer(memory)


@pytest.fixture
def own(world):
    with Communicator(world) as comm:
        yield comm


@pytest.mark.parametrize("form", ["Allreduce", "Iallreduce"])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_every_kind(own, kind, form):
    size, mine, total = own.Get_size(), KINDS[kind](), KINDS[kind]()
    for turn in range(4 * NONBLOCKING):
        if turn % 3 == 2:
            mine, total = KINDS[kind](), KINDS[kind]()
        values(mine)[:], values(total)[:] = own.Get_rank() + turn, -1
        request = getattr(own, form)(mine, total)
        if request is not None:
            request.Wait()
        assert (values(total) == size * (size - 1) // 2 + size * turn).all()
    if form == "Allreduce" and size > 1 and available() and kind != "tensor":  # has no buffer: Python code finds it
        values(total)[:] = -1
        assert find(own, form, mine, total)
        assert (values(total) == size * (size - 1) // 2 + size * turn).all()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_calls(own, kind):
    """Arguments and their values are as before."""
    size, mine, total = own.Get_size(), KINDS[kind](), KINDS[kind]()
    for _ in range(4):
        values(mine)[:], values(total)[:] = 3, 0
        own.Allreduce(mine, total)
        assert (values(total) == 3 * size).all()
        own.Bcast(total, 0)
        assert (values(total) == 3 * size).all() and (values(mine) == 3).all()


def test_memory_that_is_read_only_is_refused(own):
    for _ in range(4):
        own.Allreduce(np.ones(N), [bytearray(8 * N), MPI.DOUBLE])
        with pytest.raises((TypeError, ValueError, BufferError)):
            own.Allreduce(np.ones(N), [bytes(8 * N), MPI.DOUBLE])


COUNTS = {
    "list": list,
    "tuple": tuple,
    "array.array": lambda counts: array("i", counts),
    "long array.array": lambda counts: array("q", counts),
    "array of int32": lambda counts: np.array(counts, "i4"),
    "array of int64": lambda counts: np.array(counts, "i8"),
    "array with gaps": lambda counts: np.repeat(np.array(counts), 2)[::2],
}


@pytest.mark.parametrize("kind", COUNTS)
def test_counts_of_every_kind(own, kind):
    """Counts are compared by their values, as a user may write others into the same object."""
    size, rank = own.Get_size(), own.Get_rank()
    total = mmap.mmap(-1, 8 * 9 * size * size)
    held = np.frombuffer(total, "i8")
    given = [COUNTS[kind]([0] * size) for _ in range(2)]
    for turn in range(12):
        counts = [1 + (one + turn // 3) % 3 for one in range(size)]
        displs = [9 * one + turn // 6 for one in range(size)]
        if kind == "tuple" or turn % 5 == 4:
            given = [COUNTS[kind](counts), COUNTS[kind](displs)]
        else:
            for into, values_ in zip(given, (counts, displs)):
                for at, value in enumerate(values_):
                    into[at] = value
        held[...] = -1
        own.Allgatherv(np.full(counts[rank], 100 * turn + rank), [total, tuple(given), MPI.INT64_T])
        for one in range(size):
            block = held[displs[one] : displs[one] + counts[one]]
            assert (block == 100 * turn + one).all() and held[displs[one] + counts[one]] == -1
    if kind != "array with gaps" and available():
        arguments = np.full(counts[rank], rank), [total, tuple(given), MPI.INT64_T], MPI.SUM, 0
        own.Allgatherv(*arguments[:2])
        assert find(own, "Allgatherv", *arguments)
