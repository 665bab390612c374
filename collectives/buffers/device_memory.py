"""Device memory of an array, through CuPy: allocations, views, copies, and the order of work on its stream."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.buffers.memory import cuda_interface
from collectives.types import Wait

_LEGACY = 1
"""Number of CUDA's default stream in DLPack and the CUDA array interface. CuPy's is 0."""


class DeviceMemory:
    """Access to the CUDA device of an array through CuPy: allocations, views, and copies in the order of its stream.

    Neither the host nor the stream waits for other streams, except for the streams of arrays given to `follow`.
    `number` is the device's, `namespace` the array library, with NumPy's names. `ended` waits for the work before the
    last `mark`.
    """

    __slots__ = ("_cuda", "_device", "_event", "_others", "_stream", "ended", "namespace", "number")

    def __init__(self, array: Any) -> None:
        try:
            self.namespace = import_module("cupy")
        except ImportError as error:
            raise ImportError(
                f"an array of type {type(array).__name__!r} is on a device; access to it needs CuPy: "
                f"pip install cupy-cuda12x (or cupy-cuda13x)"
            ) from error
        self._cuda = self.namespace.cuda
        self.number = self._number(array)
        self._device = self._cuda.Device(self.number)
        with self._device:
            self._event = self._cuda.Event(disable_timing=True)
        self.ended = Wait(self._event.synchronize, lambda: self._event.done)
        self.follow(array)

    def _number(self, array: Any) -> int:
        if isinstance(array, self.namespace.ndarray):
            return int(array.device.id)
        interface = cuda_interface(array)
        if interface is None:
            return int(array.__dlpack_device__()[1])
        pointer = interface["data"][0]
        return int(self._cuda.runtime.pointerGetAttributes(pointer).device if pointer else self._cuda.Device().id)

    def holds(self, array: Any) -> bool:
        """True if the array is on this device."""
        return self._number(array) == self.number

    def follow(self, *arrays: Any) -> None:
        """Use the first array's stream from now on, and let it wait for the work now on the other arrays' streams."""
        if all([isinstance(array, self.namespace.ndarray) for array in arrays]):
            self._stream, self._others = self._cuda.get_current_stream(self.number), []
            return
        with self._device:
            self._stream, *others = [self._stream_of(array) for array in arrays]
            self._others = [other for other in others if other != self._stream] if others else []
            for other in self._others:
                self._stream.wait_event(other.record())

    def join(self) -> None:
        """Let the streams of the other arrays given to `follow` wait for the work now on the first one's."""
        if self._others:
            self.mark()
            for other in self._others:
                other.wait_event(self._event)

    def record(self, event: Any) -> None:
        """Record an event after the work that is now on the stream."""
        with self._device:
            event.record(self._stream)

    @property
    def is_idle(self) -> bool:
        """True if all work on the stream, and on CUDA's default stream, has ended.

        Work on the default stream, and on all others but those made as non-blocking, waits for each other.
        """
        with self._device:
            return bool(self._stream.done and (self._stream.ptr in (0, _LEGACY) or self._cuda.Stream.null.done))

    def wait_for(self, event: int) -> None:
        """Let later work on the stream wait for the latest record of an event. CUDA's number identifies the event."""
        with self._device:
            self._cuda.runtime.streamWaitEvent(self._stream.ptr, event)

    def _stream_of(self, array: Any) -> Any:
        """CUDA stream of `__cuda_array_interface__`, else CuPy's current one, made to wait for a DLPack array."""
        current = self._cuda.get_current_stream()
        if isinstance(array, self.namespace.ndarray):
            return current
        interface = cuda_interface(array)
        if interface is None:
            array.__dlpack__(stream=current.ptr or _LEGACY)  # the array's library makes our stream wait for its own
            return current
        pointer = interface.get("stream")
        if pointer is None or pointer == (current.ptr or _LEGACY):
            return current
        return self._cuda.ExternalStream(pointer)

    def mark(self) -> None:
        """Record an event after the work that is now on the stream. `ended` waits for it."""
        self.record(self._event)  # on this device, since stream 0 belongs to the current device

    def capture(self) -> Callable[[], AbstractContextManager[None]]:
        """Factory of contexts in which any thread uses this device and the caller's current CuPy stream."""
        with self._device:
            stream = self._cuda.get_current_stream()

        @contextmanager
        def captured() -> Iterator[None]:
            with self._device, stream:
                yield

        return captured

    def launch(self, kernels: Sequence[Callable[[int], object]], event: Any = None) -> None:
        """Call each of `kernels` with the number of `follow`'s latest stream, to launch on it. Then record an event."""
        with self._device:
            for put in kernels:
                put(self._stream.ptr)
            if event is not None:
                event.record(self._stream)

    def working(self, call: Callable[[], object]) -> Callable[[], object]:
        """Wrapper that runs CuPy's work in `call` on this device and `follow`'s latest stream, and returns None."""

        def run() -> None:
            with self._device, self._stream:
                call()

        return run

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        with self._device:
            return self.namespace.empty(count, dtype)

    def view(self, address: int, count: int, dtype: np.dtype[Any]) -> Any:
        """One-dimensional CuPy array over device memory. The caller keeps the memory alive."""
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return self.empty(0, dtype)
        memory = self._cuda.UnownedMemory(address, nbytes, None, self.number)
        return self.namespace.ndarray((count,), dtype, self._cuda.MemoryPointer(memory, 0))

    def pinned(self, nbytes: int) -> np.ndarray:
        """Allocate pinned host memory, as an array of bytes."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def to_host(self, host: np.ndarray, address: int) -> None:
        """Start a copy of device memory at `address` into `host`."""
        self._copy(MPI.Get_address(host), address, host.nbytes, self._cuda.runtime.memcpyDeviceToHost)

    def to_device(self, address: int, host: np.ndarray) -> None:
        """Start a copy of `host` into device memory at `address`."""
        self._copy(address, MPI.Get_address(host), host.nbytes, self._cuda.runtime.memcpyHostToDevice)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Start a copy within the device's memory."""
        self._copy(target, source, nbytes, self._cuda.runtime.memcpyDeviceToDevice)

    def _copy(self, target: int, source: int, nbytes: int, direction: int) -> None:
        with self._device:
            self._cuda.runtime.memcpyAsync(target, source, nbytes, direction, self._stream.ptr)
