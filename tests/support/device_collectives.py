"""Collectives of ranks whose arrays are on the stand-in's GPUs, with streams whose earlier work is late."""

import gc
import time

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.transport.gpu.device_copies import DeviceCopies
from support.doc_examples import EXAMPLES, call
from support.fakes import cupy

ERRORS = (RuntimeError, TimeoutError, OSError, MemoryError, MPI.Exception)
"""Errors of a call in which a planted fault is found."""


class Arena:
    """Arrays one after the other in memory that the ranks share, from byte `start` on; `gap` bytes behind odd ones."""

    def __init__(self, comm, nbytes=1 << 22, start=64, gap=0):
        self.memory, self._used, self._gap = comm.empty(nbytes, "u1", like=cupy), start, gap

    def empty(self, shape, dtype):
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        part = self.memory[self._used : self._used + nbytes]
        self._used += nbytes + (self._gap if nbytes % 16 else 0)
        return part.view(dtype).reshape(shape)


def right_when_late(comm, name, form, n, allocate, turn=0, delay=0.01):
    """True if a collective gives the right values where the stream of rank `turn` is late by `delay` seconds."""
    rank, size = comm.Get_rank(), comm.Get_size()
    example = EXAMPLES[name](rank, size, n, "i4", size - 1, False)
    send, recv = (None if x is None else allocate(x.shape, x.dtype) for x in (example.send, example.recv))
    shift = {"allgather": turn, "alltoall": turn, "allreduce": turn}.get(name, 0)  # other values in every turn
    with cupy.cuda.Stream(non_blocking=True) as stream:
        if rank == turn % size:
            cupy.GPU.put(stream.number, lambda: time.sleep(delay), [], ("delay", stream.number, 0))
        if send is not None:
            send[...] = cupy.asarray(example.send + shift)
        if recv is not None:
            recv[...] = cupy.asarray(example.recv)
        call(comm, example.method, form, example.arguments(send, recv))
        if send is not None:
            send[...] = cupy.full(send.shape, -7, "i4")  # it may be used again
        if recv is None or example.expected is None:
            return True
        return bool((recv.get() == example.expected + shift * (size if name == "allreduce" else 1)).all())


def passes(world, transfer, cases, prepare=lambda comm: None, delay=0.01):
    """True if on all ranks a communicator finds `transfer`, and collectives are right and their memory is freed.

    `cases`: (name, whether from memory of `comm.empty`, count of elements) of each call. Ends the GPU's engine,
    which is made if there is none.
    """
    good, comm, arena = True, None, None
    engine = cupy.GPU.engine or cupy.Engine(cupy.GPU, world.rank)
    try:
        comm = Communicator(world, cuda_aware=False)
        good = world.allreduce(comm.device_transfer == transfer, MPI.LAND)
        arena = Arena(comm) if good else None
        prepare(comm)
    except ERRORS:
        good = False
    for turn, (name, is_shared, n) in enumerate(cases):
        good = world.allreduce(good, MPI.LAND)
        if not good:
            break
        try:
            good = right_when_late(comm, name, "blocking", n, arena.empty if is_shared else cupy.empty, turn, delay)
        except ERRORS:
            good = False
    good = world.allreduce(good, MPI.LAND)
    try:
        if good:
            del arena
            gc.collect()
            comm.empty(1, like=cupy)
    except ERRORS:
        good = False
    for end in (lambda: comm and comm.close(), engine.stop):
        try:
            end()
        except ERRORS:
            good = False
    return world.allreduce(good, MPI.LAND)


def reached_at_once(name):
    """Fault to plant in a method of `DeviceCopies`: its copies' events have been reached before their time."""
    copy = getattr(DeviceCopies, name)

    def early(self, *arguments):
        copy(self, *arguments)
        return cupy.cuda.Event(disable_timing=True)

    return DeviceCopies, name, early
