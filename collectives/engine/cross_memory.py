"""Cross-memory attach: read and write the memory of another process of the node with one copy (process_vm_readv)."""

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class _Iovec(ctypes.Structure):
    """struct iovec of the kernel."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Iovecs(threading.local):
    """Arguments of a copy, for each thread: memory of this process and of the other one, and their addresses."""

    def __init__(self) -> None:
        here, there = _Iovec(), _Iovec()
        self.both = here, there, ctypes.addressof(here), ctypes.addressof(there)


_iovecs = _Iovecs()


def _system_call(name: str) -> Any:
    """process_vm_readv or process_vm_writev of the C library, or None if it is missing."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return function


class CrossMemoryAttach:
    """Access to the memory of one process (Linux; same user, and Yama must permit it)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._readv, self._writev = _system_call("process_vm_readv"), _system_call("process_vm_writev")

    def read(self, into: int, origin: int, nbytes: int) -> None:
        """Copy `nbytes` from address `origin` of that process to address `into` of this one. OSError if refused."""
        self._copy(self._readv, "reading", into, origin, nbytes)

    def write(self, source: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` from address `source` of this process to address `target` of that one. OSError if refused."""
        self._copy(self._writev, "writing", source, target, nbytes)

    def _copy(self, call: Any, verb: str, ours: int, theirs: int, nbytes: int) -> None:
        if call is None:
            raise OSError(f"{verb} the memory of process {self.pid}: this system has no call for it")
        here, there, at_here, at_there = _iovecs.both
        while nbytes > 0:  # the kernel copies at most 2 GiB at a time
            here.base, here.length = ours, nbytes
            there.base, there.length = theirs, nbytes
            done = call(self.pid, at_here, 1, at_there, 1, 0)
            if done <= 0:
                error = ctypes.get_errno()
                raise OSError(error, f"{verb} {nbytes} bytes of process {self.pid}: {os.strerror(error)}")
            ours, theirs, nbytes = ours + done, theirs + done, nbytes - done


def permitted(copy: Callable[[int, int, int], None], ours: int, theirs: int, nbytes: int) -> bool:
    """Try a method of `CrossMemoryAttach` on these bytes. True if the system has it and permits it."""
    with suppress(OSError):
        copy(ours, theirs, nbytes)
        return True
    return False
