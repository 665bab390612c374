"""Arrays at addresses that a test needs."""

import numpy as np


def placed(array, shift):
    """Copy of an array at an address that is `shift` bytes beyond a multiple of 64."""
    memory = np.zeros(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + shift
    copy = memory[start : start + array.nbytes].view(array.dtype)
    copy[...] = array
    return copy
