"""Transport of device memory between nodes: MPI messages from and to pinned host memory.

Programs cut long messages into parts. If an array is on the host, its rank sends or receives MPI messages of the same
lengths. A part leaves its device for a buffer of this rank while those before it are on the network. At the receiver
it enters the device while those after it arrive.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.buffers.device_memory import DeviceMemory
from collectives.transport.gpu.device_copies import DeviceCopies
from collectives.transport.gpu.device_wire import DeviceWire, MessageParts
from collectives.transport.mpi.mpi_transport import LengthCheck
from collectives.transport.node.staging_chunks import CHUNK
from collectives.transport.wire import Iovec

IN_FLIGHT = 3
"""Parts to, or from, one rank that have a buffer: one is copied while two are on the network."""

BUDGET, LEAST = 1 << 27, 1 << 18
"""Most bytes of the buffers of a call that exchanges with all ranks. The largest part follows from it. Parts of
`LEAST` bytes are allowed beyond that, from 87 ranks on."""

SMALLEST = 1 << 12
"""Bytes of the smallest buffers."""


def largest_part(size: int) -> int:
    """Bytes of the largest parts in a communicator of `size` ranks, a power of two.

    >>> [largest_part(size) >> 10 for size in (2, 6, 16, 100)]
    [4096, 4096, 1024, 256]
    """
    room = BUDGET // (2 * IN_FLIGHT * max(1, size - 1))
    return min(CHUNK, max(LEAST, 1 << room.bit_length() - 1))


class PinnedBuffers:
    """Pinned host memory for the parts of a communicator's messages. Their lengths are powers of two."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def take(self, device: DeviceMemory, nbytes: int) -> np.ndarray:
        """Memory of at least `nbytes`. If CUDA pins no more, it is not pinned, and copies take more time."""
        length = max(SMALLEST, 1 << max(0, nbytes - 1).bit_length())
        with suppress(IndexError):  # another thread may take the last one
            return self._free[length].pop()
        try:
            return device.pinned(length)
        except RuntimeError:
            return np.empty(length, np.uint8)

    def give_back(self, buffer: np.ndarray) -> None:
        """Let another message use the memory."""
        self._free[buffer.nbytes].append(buffer)

    def free(self) -> None:
        """Drop the memory that no message uses."""
        self._free.clear()


class _Posted:
    """Event of the end of an MPI message."""

    def __init__(self, request: MPI.Request, status: MPI.Status | None = None) -> None:
        self._request, self._status = request, status

    @property
    def done(self) -> bool:
        return self._request.Test(self._status)


class _NetworkMessage:
    """Message in two stages, a copy and an MPI message, each of which ends with an `event`."""

    done = True
    event: Any

    def __init__(self, wire: DeviceNetworkTransport, peer: int, pieces: Sequence[Iovec]) -> None:
        self._wire, self._peer, self._pieces = wire, peer, list(pieces)
        self._nbytes = sum(piece.nbytes for piece in pieces)
        self._buffer = np.empty(0, np.uint8)

    def begin(self) -> None:
        """Take a buffer, and begin the first stage."""
        self._buffer = self._wire.buffers.take(self._wire.device, self._nbytes)

    def pass_on(self) -> None:
        """End the first stage, and begin the second one."""

    def end(self) -> None:
        """End the second stage, and give the buffer back."""
        self._wire.buffers.give_back(self._buffer)

    @property
    def _address(self) -> int:
        return MPI.Get_address(self._buffer)

    @property
    def _data(self) -> list[Any]:
        return [self._buffer, self._nbytes, MPI.BYTE]


class NetworkSend(_NetworkMessage):
    """Send: a copy out of the device, then an MPI message."""

    def begin(self) -> None:
        super().begin()
        self.event = self._wire.copies.to_host(self._address, self._pieces)

    def pass_on(self) -> None:
        self._wire.copies.recycle(self.event)
        self.event = _Posted(self._wire.comm.Isend(self._data, self._peer, self._wire.tag))


class NetworkReceive(_NetworkMessage):
    """Receive: an MPI message, then a copy into the device."""

    def __init__(self, wire: DeviceNetworkTransport, peer: int, pieces: Sequence[Iovec]) -> None:
        super().__init__(wire, peer, pieces)
        self._length = LengthCheck(wire.comm, peer, self._nbytes)

    def begin(self) -> None:
        super().begin()
        self.event = _Posted(self._wire.comm.Irecv(self._data, self._peer, self._wire.tag), self._length.status)

    def pass_on(self) -> None:
        self._length.check()
        self.event = self._wire.copies.to_device(self._pieces, self._address)

    def end(self) -> None:
        self._wire.copies.recycle(self.event)
        super().end()


class NetworkLane:
    """Messages to, or from, one rank, in the order of their starts: those that wait, and those in each stage."""

    def __init__(self) -> None:
        self._waiting: deque[_NetworkMessage] = deque()
        self._first: deque[_NetworkMessage] = deque()
        self._second: deque[_NetworkMessage] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._first or self._second)

    def add(self, message: _NetworkMessage) -> None:
        message.done = False
        self._waiting.append(message)

    def advance(self) -> None:
        self._begin()
        while self._first and self._first[0].event.done:
            self._first[0].pass_on()
            self._second.append(self._first.popleft())
        while self._second and self._second[0].event.done:
            message = self._second.popleft()
            message.end()
            message.done = True
            self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self._first) + len(self._second) < IN_FLIGHT:
            self._waiting[0].begin()
            self._first.append(self._waiting.popleft())


_abandoned: list[dict[tuple[type, int], Any]] = []
"""Lanes of calls that were aborted: MPI may still use the buffers of their messages."""


class DeviceNetworkTransport(DeviceWire):
    """Transport of device memory by MPI messages with a tag. `cut` gives the bytes per part of a message."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        tag: int,
        device: DeviceMemory,
        copies: DeviceCopies,
        buffers: PinnedBuffers,
        cut: Callable[[int], int],
    ) -> None:
        super().__init__()
        self.comm, self.tag, self.device, self.copies, self.buffers = comm, tag, device, copies, buffers
        self._cut = cut

    def use_tag(self, tag: int) -> None:
        self.tag = tag

    def outgoing(self, peer: int, pieces: Sequence[Iovec]) -> MessageParts:
        return MessageParts([NetworkSend(self, peer, pieces)], self._lane(NetworkSend, peer))

    def incoming(self, peer: int, pieces: Sequence[Iovec]) -> MessageParts:
        return MessageParts([NetworkReceive(self, peer, pieces)], self._lane(NetworkReceive, peer))

    def _lane(self, kind: type, peer: int) -> NetworkLane:
        lane: NetworkLane = self.lanes.setdefault((kind, peer), NetworkLane())
        return lane

    def split_size(self, peer: int, nbytes: int) -> int:
        return self._cut(nbytes)

    def free(self) -> None:
        """Wait for the copies of a call that was aborted, and keep its buffers."""
        if self.is_busy:
            self.copies.finish()
            _abandoned.append(self.lanes)
            self.lanes = {}
