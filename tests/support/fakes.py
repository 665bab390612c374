"""Stand-ins for what this machine may lack: a GPU, and wires that say what goes over them.

`cupy` is the stand-in of tests/support/standin, which the fixture `gpu` puts in CuPy's place for one test.
"""

import ctypes
from contextlib import nullcontext

import numpy as np

from support.loopback import LoopbackHub
from support.standin import cupy

__all__ = ["Foreign", "GpuHub", "NoInterface", "cupy"]


class Foreign:
    """Device memory as another library than CuPy shows it: by its interface only, and on a stream of its own."""

    def __init__(self, array, *, dtype=None, stream=None, readonly=False, strides=None):
        self._array = array
        self.dtype = array.dtype if dtype is None else np.dtype(dtype)
        self._own = {"data": (array.data.ptr, readonly), "stream": None if stream is None else stream.ptr}
        if strides is not None:
            self._own["strides"] = strides

    @property
    def __cuda_array_interface__(self):
        interface = {**self._array.__cuda_array_interface__, **self._own, "typestr": self.dtype.str}
        if self.dtype != self._array.dtype:
            interface["shape"] = (self._array.nbytes // self.dtype.itemsize,)
        return interface


class NoInterface:
    """Device memory that is shown by DLPack only."""

    def __init__(self, array, stream=None):
        self._array, self._stream = array, stream
        self.asked = []  # the streams that were to be ordered behind its own

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        self.asked.append(options.get("stream"))
        with self._stream or nullcontext():
            return self._array.__dlpack__(**options)


class GpuHub(LoopbackHub):
    """A loopback that carries device memory as well, and refuses messages whose memory is still being worked on.

    Attributes
    ----------
    carried : set of bool
        Whether the pieces that were sent or received lay on the device: {True} says that all did.
    """

    def __init__(self, size):
        super().__init__(size)
        self.carried = set()

    def start(self, message):
        for address, nbytes in message.pieces:
            busy = cupy.GPU.touched(address, nbytes)
            if busy:
                raise RuntimeError(f"a message of pair {message.pair} starts while streams {busy} work on its memory")
            if nbytes:
                self.carried.add(address >= cupy.HIDDEN)
        super().start(message)

    def copy(self, source, target):
        assert source.nbytes == target.nbytes, f"{source.nbytes} bytes met room for {target.nbytes}"
        data = b"".join(_read(*piece) for piece in source.pieces)
        for address, nbytes in target.pieces:
            _write(address, data[:nbytes])
            data = data[nbytes:]


def _read(address, nbytes):
    return cupy.GPU.at(address, nbytes).tobytes() if address >= cupy.HIDDEN else ctypes.string_at(address, nbytes)


def _write(address, data):
    if address >= cupy.HIDDEN:
        cupy.GPU.at(address, len(data))[:] = np.frombuffer(data, np.uint8)
    else:
        ctypes.memmove(address, data, len(data))
