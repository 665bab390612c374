"""Device memory and events that processes share, for the stand-in: files of shared memory in place of a GPU's.

Stricter than CUDA where a mistake would pass unseen there: memory that its owner freed cannot be read or opened, an
event that was not recorded cannot be waited for, and whoever waits for a process that ended is told.
"""

import fcntl
import mmap
import os
import secrets
import struct
import tempfile
import time
from contextlib import contextmanager

import numpy as np

HANDLE = struct.Struct("16s q q q q 16x")
"""Token, process, descriptor, bytes and device: as long as CUDA's handles, 64 bytes."""

RECORDED, COMPLETED, FREED = range(3)
WORDS = 8
PATIENCE = 100
"""Seconds after which a wait for another process is an error."""


class Refused(RuntimeError):
    """Becomes CUDA's error."""


class Shared:
    """A file of shared memory: words that describe its state, then its bytes."""

    def __init__(self, nbytes, device=0):
        self.nbytes, self.token, self.pid, self.device = nbytes, secrets.token_bytes(16), os.getpid(), device
        self.descriptor = os.memfd_create(self.token.hex())
        os.ftruncate(self.descriptor, 8 * WORDS + nbytes)
        self._map()

    def _map(self):
        memory = np.frombuffer(mmap.mmap(self.descriptor, 8 * WORDS + self.nbytes), np.uint8)
        self.words, self.bytes = memory[: 8 * WORDS].view(np.int64), memory[8 * WORDS :]

    @property
    def handle(self):
        return HANDLE.pack(self.token, self.pid, self.descriptor, self.nbytes, self.device)

    @classmethod
    def open(cls, handle):
        """The memory behind a handle of another process."""
        self = cls.__new__(cls)
        self.token, self.pid, number, self.nbytes, self.device = HANDLE.unpack(handle)
        if self.pid == os.getpid():
            raise Refused("cudaErrorDeviceUninitialized: a handle is for other processes than its own")
        path = f"/proc/{self.pid}/fd/{number}"
        try:
            if self.token.hex() not in os.readlink(path):
                raise Refused("cudaErrorInvalidResourceHandle: the memory was freed")
            self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Refused(f"cudaErrorInvalidResourceHandle: {error}") from error
        self._map()
        return self

    @property
    def owner_lives(self):
        return self.pid == os.getpid() or os.path.exists(f"/proc/{self.pid}")

    def check(self):
        if self.words[FREED]:
            raise RuntimeError("memory of another process is used after that has freed it")

    def free(self):
        """Give the memory back; the owner's end is seen by all."""
        if self.pid == os.getpid():
            self.words[FREED] = 1
        os.close(self.descriptor)


class SharedEvent:
    """An event as two counters: the numbers of the last record that was put on a stream, and that was reached."""

    def __init__(self, shared=None):
        self.shared = shared or Shared(0)

    def record(self):
        """Note a record; return the function that a stream calls when it reaches it."""
        words = self.shared.words
        words[RECORDED] += 1
        number = int(words[RECORDED])

        def reach():
            words[COMPLETED] = max(words[COMPLETED], number)

        return reach

    def awaited(self):
        """Function that tells if the record that is the latest now is reached."""
        number = int(self.shared.words[RECORDED])
        if not number:
            raise RuntimeError("a stream waits for an event that was not recorded: CUDA would not wait at all")
        deadline = time.monotonic() + PATIENCE

        def reached():
            if self.shared.words[COMPLETED] >= number:
                return True
            if not self.shared.owner_lives:
                raise RuntimeError(f"process {self.shared.pid} ended before its event")
            if time.monotonic() > deadline:
                raise RuntimeError(f"an event of process {self.shared.pid} was not reached in {PATIENCE} s")
            return False

        return reached


class Turns:
    """Lock of the GPU: kernels of one process at a time, as without MPS. `path` names the GPU."""

    def __init__(self, path=None):
        self._descriptor = None if path is None else os.open(path, os.O_RDWR)

    @contextmanager
    def held(self):
        if self._descriptor is None:
            yield
            return
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def new_gpu():
    """Path that names a GPU, for `Turns` of the processes that share it."""
    descriptor, path = tempfile.mkstemp(prefix="standin-gpu-")
    os.close(descriptor)
    return path
