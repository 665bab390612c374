"""Stand-ins for what this machine may lack: a device whose memory nothing but its own copies can reach.

An address on the fake device is no address of this process, its arrays refuse the buffer protocol and
`__array__`, and its copies happen only when the stream is synchronised, from and to memory that the device
pinned itself. Whoever hands such memory to MPI or NumPy, or forgets to wait, fails at once.
"""

from typing import Any

import numpy as np

from collectives import staging


class Device:
    """Memory by address, pinned host memory, and one stream of copies that waits until it is synchronised."""

    def __init__(self) -> None:
        self._next = 1 << 62  # beyond what any process can map
        self._memory: dict[int, np.ndarray] = {}
        self._pinned: list[np.ndarray] = []
        self._queue: list[tuple[np.ndarray, np.ndarray]] = []
        self.log: list[tuple[str, int]] = []  # every copy with its bytes, and every wait

    def allocate(self, nbytes: int) -> int:
        address = self._next
        self._memory[address] = np.zeros(nbytes, np.uint8)
        self._next += nbytes + 4096
        return address

    def at(self, address: int, nbytes: int) -> np.ndarray:
        """What lies there; a segmentation fault, as an exception, if nothing does."""
        for start, memory in self._memory.items():
            if start <= address and address + nbytes <= start + memory.nbytes:
                return memory[address - start :][:nbytes]
        raise RuntimeError(f"{nbytes} bytes at {address:#x} are not on this device")

    def pinned(self, nbytes: int) -> np.ndarray:
        self._pinned.append(np.full(nbytes, 0xAA, np.uint8))
        return self._pinned[-1]

    def to_host(self, host: np.ndarray, address: int) -> None:
        self._copy("to_host", host, self.at(address, host.nbytes), host)

    def to_device(self, address: int, host: np.ndarray) -> None:
        self._copy("to_device", self.at(address, host.nbytes), host, host)

    def _copy(self, kind: str, target: np.ndarray, source: np.ndarray, host: np.ndarray) -> None:
        if host.nbytes and not any(np.shares_memory(host, pinned) for pinned in self._pinned):
            raise RuntimeError("an asynchronous copy needs pinned memory")
        self._queue.append((target, source))
        self.log.append((kind, host.nbytes))

    def synchronize(self) -> None:
        for target, source in self._queue:
            target[:] = source
        self._queue.clear()
        self.log.append(("synchronize", 0))


class DeviceArray:
    """Like a CuPy array, as far as a library that only asks for ``__cuda_array_interface__`` can tell."""

    def __init__(self, values: Any, device: Device, *, strides: Any = None, readonly: bool = False) -> None:
        values = np.asarray(values)
        self.device, self.dtype, self.shape = device, values.dtype, values.shape
        self._strides, self._readonly, self._nbytes = strides, readonly, values.nbytes
        self._address = device.allocate(values.nbytes)
        device.at(self._address, values.nbytes)[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self._address, self._readonly)
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": data,
            "strides": self._strides,
        }

    def get(self) -> np.ndarray:
        """The values, as the device itself sees them."""
        return self.device.at(self._address, self._nbytes).copy().view(self.dtype).reshape(self.shape)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("implicit conversion of device memory to a NumPy array")

    def __buffer__(self, flags: int) -> memoryview:
        raise TypeError("device memory has no buffer")


staging.register(DeviceArray, lambda array: array.device)
