"""The stand-in for CuPy in several processes: memory and events that they share, refusals, one GPU for all."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.fakes import cupy

runtime = cupy.cuda.runtime
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def engine(gpu, request):
    """A GPU that works by itself, in an order of the test's seed."""
    made = cupy.Engine(gpu, request.param)
    yield made
    if gpu.engine is made:
        made.stop()


def array_on(pointer, count, dtype="i4"):
    memory = cupy.cuda.UnownedMemory(pointer, count * np.dtype(dtype).itemsize, None)
    return cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, 0))


def exportable(count, dtype="i4"):
    memory = cupy.cuda.Memory(count * np.dtype(dtype).itemsize)
    return cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, 0))


@pytest.mark.parametrize("engine", range(5), indirect=True)
def test_ring_of_memory_and_events(world, engine):
    """Each rank's stream reads the memory of the rank before as soon as that has written it, without a host's wait."""
    rank, size = world.rank, world.size
    if size == 1:
        pytest.skip("needs two processes")
    mine, ready, read = exportable(100), *(cupy.cuda.Event(disable_timing=True, interprocess=True) for _ in range(2))
    handles = runtime.ipcGetMemHandle(mine.data.ptr), *map(runtime.ipcGetEventHandle, (ready.ptr, read.ptr))
    everyone = world.allgather(handles)
    left, right = everyone[(rank - 1) % size], everyone[(rank + 1) % size]
    theirs = array_on(runtime.ipcOpenMemHandle(left[0]), 100)
    written, free = runtime.ipcOpenEventHandle(left[1]), runtime.ipcOpenEventHandle(right[2])
    stream, found = cupy.cuda.Stream(non_blocking=True), []
    with stream:
        for turn in range(4):
            if turn:
                runtime.streamWaitEvent(stream.ptr, free)
            mine[...] = cupy.multiply(cupy.full(100, turn + 1, "i4"), cupy.full(100, 10 + rank, "i4"))
            ready.record(stream)
            world.Barrier()  # a stream waits for the record that is the latest when it is told to
            runtime.streamWaitEvent(stream.ptr, written)
            found.append(theirs.copy())
            read.record(stream)
            world.Barrier()
        stream.synchronize()
    for turn, array in enumerate(found):
        assert (array._seen() == (turn + 1) * (10 + (rank - 1) % size)).all()
    world.Barrier()


@pytest.mark.parametrize("engine", [3], indirect=True)
def test_without_the_wait_old_data_are_read(world, engine):
    """Nothing but events orders the work of two processes: here a stream writes after the other rank has read."""
    mine = exportable(10)
    theirs = world.allgather(runtime.ipcGetMemHandle(mine.data.ptr))[(world.rank - 1) % world.size]
    if world.size == 1:
        pytest.skip("needs two processes")
    array, everyone_has_read = array_on(runtime.ipcOpenMemHandle(theirs), 10), threading.Event()
    mine._seen()[...] = 1
    with cupy.cuda.Stream(non_blocking=True) as writing:
        cupy.GPU.put(writing.number, bool, [], ("delay", writing.number, 0), ready=everyone_has_read.is_set)
        mine[...] = cupy.full(10, 2, "i4")
    world.Barrier()
    for expected in 1, 2:
        with cupy.cuda.Stream(non_blocking=True) as reading:
            found = array.copy()
        reading.synchronize()
        assert (found._seen() == expected).all()
        world.Barrier()
        everyone_has_read.set()
        writing.synchronize()
        world.Barrier()


def test_one_process_at_a_time(world, gpu):
    """A kernel that waits for the kernel of another process waits in vain."""
    if world.size == 1:
        pytest.skip("needs two processes")
    path = world.bcast(cupy.interprocess.new_gpu() if world.rank == 0 else None)
    gpu.turns = cupy.interprocess.Turns(path)
    flag = exportable(1)
    handle = world.bcast(runtime.ipcGetMemHandle(flag.data.ptr) if world.rank == 0 else None)
    flag._seen()[...] = 0
    shown = flag._seen() if world.rank == 0 else array_on(runtime.ipcOpenMemHandle(handle), 1)._seen()
    seen = []

    def spin():
        world.Barrier()
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline and not seen:
            seen.extend(shown.tolist() if shown[0] else [])

    def write():
        shown[0] = 1

    if world.rank == 0:
        gpu.put(0, spin, [], ("kernel", 0, 0))
    else:
        world.Barrier()
        gpu.put(0, write, [], ("kernel", 0, 0))
    gpu.run(0, gpu.begun[0])
    world.Barrier()
    assert not seen and shown[0] == 1
    world.Barrier()
    if world.rank == 0:
        os.remove(path)


CHILD = """
import sys
from support.standin import cupy
memory, event = cupy.cuda.Memory(64), cupy.cuda.Event(disable_timing=True, interprocess=True)
event.record() if "recorded" in sys.argv else None
print(cupy.cuda.runtime.ipcGetMemHandle(memory.ptr).hex(), cupy.cuda.runtime.ipcGetEventHandle(event.ptr).hex())
sys.stdout.flush()
for line in sys.stdin:
    if "free" in line:
        del memory
        print("freed", flush=True)
"""


class Peer:
    """Another process with memory and an event."""

    def __init__(self, *arguments):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI"))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments],
            env={**environment, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.memory, self.event = map(bytes.fromhex, self.process.stdout.readline().split())

    def free(self):
        self.process.stdin.write("free\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "freed\n"

    def end(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def peer(gpu, request):
    made = Peer(*getattr(request, "param", ()))
    yield made
    made.end()


def refused(message, call, *arguments):
    with pytest.raises(runtime.CUDARuntimeError, match=message):
        call(*arguments)


def test_memory_is_opened_once(peer):
    first = runtime.ipcOpenMemHandle(peer.memory)
    assert runtime.ipcOpenMemHandle(peer.memory) == first
    array = array_on(first, 4)
    runtime.ipcCloseMemHandle(first)
    array[...] = 1
    cupy.cuda.get_current_stream().synchronize()
    runtime.ipcCloseMemHandle(first)
    refused("not opened", runtime.ipcCloseMemHandle, first)
    with pytest.raises(RuntimeError, match="not on this device"):
        array._seen()


def test_freed_memory(peer):
    array = array_on(runtime.ipcOpenMemHandle(peer.memory), 4)
    peer.free()
    with pytest.raises(RuntimeError, match="after that has freed it"):
        array._seen()
    fresh = Peer()
    fresh.free()
    refused("InvalidResourceHandle", runtime.ipcOpenMemHandle, fresh.memory)
    fresh.end()


def test_process_that_ends(peer):
    event = runtime.ipcOpenEventHandle(peer.event)
    with pytest.raises(RuntimeError, match="not recorded"):
        runtime.streamWaitEvent(0, event)
    peer.end()
    refused("InvalidResourceHandle", runtime.ipcOpenMemHandle, peer.memory)


@pytest.mark.parametrize("peer", [("recorded",)], indirect=True)
def test_process_that_ends_before_its_event(peer):
    runtime.streamWaitEvent(0, runtime.ipcOpenEventHandle(peer.event))
    peer.end()
    with pytest.raises(RuntimeError, match="ended before its event"):
        cupy.cuda.get_current_stream().synchronize()


def test_what_has_no_handle(gpu):
    refused("invalid argument", runtime.ipcGetMemHandle, cupy.zeros(4).data.ptr)
    gpu.asynchronous_pool = True
    refused("asynchronous pool", runtime.ipcGetMemHandle, cupy.zeros(4).data.ptr)
    memory = cupy.cuda.Memory(64)
    assert runtime.ipcGetMemHandle(memory.ptr + 16) == runtime.ipcGetMemHandle(memory.ptr), "the whole allocation's"
    refused("other processes", runtime.ipcOpenMemHandle, runtime.ipcGetMemHandle(memory.ptr))
    event = cupy.cuda.Event(disable_timing=True)
    refused("not for other processes", runtime.ipcGetEventHandle, event.ptr)
    refused("no times", lambda: cupy.cuda.Event(interprocess=True))
