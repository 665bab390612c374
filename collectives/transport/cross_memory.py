"""Cross-memory attach: read the memory of another process of the node with one copy (process_vm_readv)."""

import ctypes
import os
from contextlib import suppress
from typing import Any


class _Iovec(ctypes.Structure):
    """struct iovec of the kernel."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _system_call() -> Any:
    """process_vm_readv of the C library, or None if it is missing."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return function


class CrossMemoryAttach:
    """Reader of the memory of one process (Linux; same user, and Yama must permit it)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._call = _system_call()
        self._here, self._there = _Iovec(), _Iovec()
        self._addresses = ctypes.addressof(self._here), ctypes.addressof(self._there)

    def read(self, into: int, origin: int, nbytes: int) -> None:
        """Copy `nbytes` from address `origin` of that process to address `into` of this one; OSError if refused."""
        call, here, there, (at_here, at_there) = self._call, self._here, self._there, self._addresses
        while nbytes > 0:  # the kernel copies at most 2 GiB at a time
            here.base, here.length = into, nbytes
            there.base, there.length = origin, nbytes
            done = call(self.pid, at_here, 1, at_there, 1, 0)
            if done <= 0:
                error = ctypes.get_errno()
                raise OSError(error, f"reading {nbytes} bytes of process {self.pid}: {os.strerror(error)}")
            into, origin, nbytes = into + done, origin + done, nbytes - done

    def able(self, into: int, origin: int, nbytes: int) -> bool:
        """Try to `read` these bytes; True if the kernel permits it."""
        with suppress(OSError):
            if self._call is not None:
                self.read(into, origin, nbytes)
                return True
        return False
