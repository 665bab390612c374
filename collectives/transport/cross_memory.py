"""Cross-memory attach: read the memory of another process of the node with one copy (process_vm_readv)."""

from __future__ import annotations

import ctypes
import os
from typing import Any


class _ContiguousRun(ctypes.Structure):
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
    """Reader of the memory of one process (Linux; same user, and Yama must permit it).

    Parameters
    ----------
    pid : int
        The process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._call = _system_call()
        self._here, self._there = _ContiguousRun(), _ContiguousRun()
        self._at = ctypes.addressof(self._here), ctypes.addressof(self._there)

    def read(self, into: int, origin: int, nbytes: int) -> None:
        """Copy `nbytes` from the address `origin` of the process to the address `into` of this one.

        Raises
        ------
        OSError
            If the kernel refuses.
        """
        call, here, there, (at_here, at_there) = self._call, self._here, self._there, self._at
        while nbytes > 0:  # the kernel moves 2 GiB at a time
            here.base, here.length = into, nbytes
            there.base, there.length = origin, nbytes
            got = call(self._pid, at_here, 1, at_there, 1, 0)
            if got <= 0:
                error = ctypes.get_errno()
                raise OSError(error, f"reading {nbytes} bytes of process {self._pid}: {os.strerror(error)}")
            into, origin, nbytes = into + got, origin + got, nbytes - got

    def able(self, into: int, origin: int, nbytes: int) -> bool:
        """Try a read; True if the kernel permits it."""
        if self._call is None:
            return False
        try:
            self.read(into, origin, nbytes)
        except OSError:
            return False
        return True
