"""Planted faults in the kernels' transfer of ranks that share a GPU: each one makes the checks of this file fail."""

from itertools import product
from types import SimpleNamespace

import pytest
from support.device_collectives import passes
from support.fakes import cupy

from collectives.buffers.device_memory import DeviceMemory
from collectives.runtime.gpu import gpu_program
from collectives.runtime.gpu.gpu_program import _GpuCall
from collectives.transport.gpu.exported_memory import Exported, ExportedMemory
from collectives.transport.gpu.gpu_channel import POSTED, VERSION, GpuChannel
from collectives.transport.gpu.gpu_kernels import GpuKernels

CASES = [(name, shared, 400) for name, shared in product(("allgather", "allreduce", "scan"), (True, False, True))]

FIND, UNUSED, LOAD = ExportedMemory.find, ExportedMemory.unused, _GpuCall._load
NEW_POST = GpuChannel.new_post


def on_another_stream(self, event):
    with self._device:
        event.record(cupy.cuda.Stream(non_blocking=True))


def waits_on_another_stream(self, event):
    cupy.cuda.runtime.streamWaitEvent(cupy.cuda.Stream(non_blocking=True).ptr, event)


def without_offset(self, address, nbytes):
    found = FIND(self, address, nbytes)
    return found and Exported(found.handle, 0)


def of_the_pool(self, nbytes):
    """An allocation of the pool, whose handle CUDA refuses, or gives for the pool's own block."""
    memory = cupy.zeros(nbytes, "u1")
    return self._runtime.ipcGetMemHandle(memory.data.ptr)


def records_in_reverse(self):
    return [records[self.number % 2] for records in self._records][::-1]


def does_not_meet(self, post, waits=False):
    """Posts, and waits for nobody: the leader waits for events before they are recorded."""
    self.number += 1
    own, turn = self.gpu.words[self.gpu.rank], self.number % 2
    self._records[self.gpu.rank][turn], version = post
    own[self._at + VERSION + turn], own[self._at + POSTED + turn] = -version if waits else version, self.number
    own[self._at] = self.number
    yield from ()


def of_the_same_version(self, mark, parts=1):
    return NEW_POST(self, mark, parts)._replace(version=1)


def frees_after_the_call(self, part, parts):
    """The memory is freed when the kernel is not on a stream yet."""
    post = LOAD(self, part, parts)
    for block in self._gpu.exported.blocks:
        cupy.GPU.shared[block.address][0].words[cupy.interprocess.FREED] = 1
    return post


def frees_before_others_close(self):
    blocks = UNUSED(self)
    handles = [SimpleNamespace(handle=block.handle) for block in blocks]
    self.release(blocks)
    return handles


FAULTS = {
    "no wait for the other ranks' events": lambda: (DeviceMemory, "wait_for", lambda self, event: None),
    "waits on the wrong stream": lambda: (DeviceMemory, "wait_for", waits_on_another_stream),
    "event recorded on the wrong stream": lambda: (DeviceMemory, "record", on_another_stream),
    "thought idle while at work": lambda: (DeviceMemory, "is_idle", True),
    "thought to have ended": lambda: (ExportedMemory, "is_reached", lambda self, handle: True),
    "event never recorded": lambda: (DeviceMemory, "record", lambda self, event: None),
    "an older post taken for the new one": lambda: (GpuChannel, "new_post", of_the_same_version),
    "event waited for before its record": lambda: (GpuChannel, "meet", does_not_meet),
    "done before the launch": lambda: (GpuChannel, "is_launched", lambda self: True),
    "handle without the offset": lambda: (ExportedMemory, "find", without_offset),
    "handle of a pool": lambda: (ExportedMemory, "allocate", of_the_pool),
    "freed too early": lambda: (_GpuCall, "_load", frees_after_the_call),
    "wrong order of ranks": lambda: (GpuChannel, "records", property(records_in_reverse)),
    "copies of the input left out": lambda: (GpuKernels, "copies", lambda self, pieces: []),
    "prefixes in place of totals": lambda: (gpu_program, "TOTAL", 1),
    "freed before the others close": lambda: (ExportedMemory, "unused", frees_before_others_close),
}


def test_without_a_fault(gpu, impatient, world):
    if world.size == 1:
        pytest.skip("needs two processes")
    assert passes(world, "kernel", CASES, delay=0.03)


SLOW = {"event waited for before its record", "event never recorded", "freed too early", "wrong order of ranks"}
"""Faults that end with the time limit of `impatient`."""


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=[pytest.mark.full] if one in SLOW else []) for one in FAULTS]
)
def test_fault_is_found(gpu, impatient, world, monkeypatch, fault):
    if world.size == 1:
        pytest.skip("needs two processes")
    monkeypatch.setattr(*FAULTS[fault]())
    timed = "event" in fault or "stream" in fault
    if timed:  # used where streams are busy, as all are here, and hosts do not wait for them
        monkeypatch.setattr(gpu_program, "PATIENCE", 0)
        monkeypatch.setattr(DeviceMemory, "is_idle", False)
    delay, turns = (0.25, 8) if timed else (0.03, 1)  # on a busy machine the right order may come about by chance
    assert not all(passes(world, "kernel", CASES, delay=delay) for _ in range(turns))
