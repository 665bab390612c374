"""Copies between device memory and pinned host memory, beside the user's streams, and pinning of mailboxes."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.schedule.topology import Nodes
from collectives.transport.gpu.gpu_kernels import KernelLaunch
from collectives.transport.mpi.reduced import reduced
from collectives.transport.node.mailbox import NodeMemory
from collectives.transport.wire import Iovec

PORTABLE = 1
"""CUDA's cudaHostRegisterPortable: pinned for all devices of the process."""

TOKEN = 64
"""Bytes of the message that tests a node's pinned mailboxes: more than fit beside a flag."""


class DeviceCopies:
    """Copies from and to one device through CuPy, on two streams of their own, one for each direction.

    They do not wait for work on other streams: the caller knows that the memory is ready. `between_devices`: what takes
    the place of host memory is device memory too.
    """

    def __init__(self, cupy: ModuleType, number: int, between_devices: bool = False) -> None:
        self._runtime, self._new_event = cupy.cuda.runtime, cupy.cuda.Event
        names = ("memcpyDefault",) * 2 if between_devices else ("memcpyDeviceToHost", "memcpyHostToDevice")
        self._kinds = [getattr(self._runtime, name) for name in names]
        self._device = cupy.cuda.Device(number)
        with self._device:
            self._down, self._up = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self._idle: list[Any] = []

    def to_host(self, host: int, pieces: Sequence[Iovec]) -> Any:
        """Start copies of device memory, concatenated, to the address `host`. Return the event of their end."""
        with self._device:
            for address, nbytes in pieces:
                if nbytes:
                    self._runtime.memcpyAsync(host, address, nbytes, self._kinds[0], self._down.ptr)
                host += nbytes
            return self._recorded(self._down)

    def to_device(self, pieces: Sequence[Iovec], host: int) -> Any:
        """Start copies of memory at the address `host` to pieces of device memory. Return the event of their end."""
        with self._device:
            for address, nbytes in pieces:
                if nbytes:
                    self._runtime.memcpyAsync(address, host, nbytes, self._kinds[1], self._up.ptr)
                host += nbytes
            return self._recorded(self._up)

    def launch(self, kernel: KernelLaunch, sends: bool) -> Any:
        """Put a kernel that sends, or receives, on the stream of such copies. Return the event of its end."""
        stream = self._down if sends else self._up
        with self._device:
            kernel.put(stream.ptr)
            return self._recorded(stream)

    def _recorded(self, stream: Any) -> Any:
        try:
            event = self._idle.pop()
        except IndexError:  # another thread may take the last one
            event = self._new_event(disable_timing=True)
        event.record(stream)
        return event

    def recycle(self, event: Any) -> None:
        """Take back an event of this class's that was reached."""
        if isinstance(event, self._new_event):
            self._idle.append(event)

    def pin(self, address: int, nbytes: int) -> None:
        """Pin host memory for copies. RuntimeError if CUDA refuses."""
        with self._device:
            self._runtime.hostRegister(address, nbytes, PORTABLE)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._runtime.hostUnregister(address)

    def finish(self) -> None:
        """Wait for all copies."""
        self._down.synchronize()
        self._up.synchronize()


class PinnedMailboxes:
    """Mailboxes of a node, pinned in this process so that the device copies from and to them. `copies` by device.

    Without `node` it only has `copies`.
    """

    def __init__(self, node: NodeMemory | None, cupy: ModuleType) -> None:
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self._pinned: list[int] = []
        self._copies: dict[int, DeviceCopies] = {}
        try:
            for memory in node.ranges() if node is not None else ():
                self.pin(memory)
        except RuntimeError:
            self.free()
            raise

    def pin(self, memory: Sequence[np.ndarray]) -> None:
        """Pin mailboxes of all ranks. RuntimeError if CUDA refuses."""
        for each in memory:
            self._runtime.hostRegister(MPI.Get_address(each), each.nbytes, PORTABLE)
            self._pinned.append(MPI.Get_address(each))

    def copies(self, number: int) -> DeviceCopies:
        """Copies of the device with this number."""
        if number not in self._copies:
            self._copies[number] = DeviceCopies(self._cupy, number)
        return self._copies[number]

    def free(self) -> None:
        """Wait for copies that are under way, and unpin the mailboxes."""
        for copies in self._copies.values():
            copies.finish()
        self._copies.clear()
        while self._pinned:
            self._runtime.hostUnregister(self._pinned.pop())


class PinningResult(NamedTuple):
    """The pinned mailboxes, or None and the reason why there are none. The same kind on all ranks.

    `shares_gpu`: all ranks are on one node, and one GPU is current on all of them.
    """

    mailboxes: PinnedMailboxes | None
    reason: str
    shares_gpu: bool = False


def pin_mailboxes(comm: MPI.Intracomm, node: NodeMemory | None, nodes: Nodes | None, wanted: bool) -> PinningResult:
    """Pin the mailboxes.

    Test with a message from device to device through each rank's mailbox, and by MPI between nodes.

    Collective over `comm`. `nodes` has the node of each rank, None for one node. `wanted` is equal on all ranks. If it
    is True, all ranks have imported CuPy: this function does not import it, nor use the GPU of a program that does
    not.
    """
    cupy = sys.modules.get("cupy")
    if not wanted or cupy is None:
        return PinningResult(None, "not wanted, or CuPy not imported, on some rank")
    shared = node if node is not None and node.size > 1 else None
    mailboxes, error = None, ""
    try:
        if cupy.cuda.runtime.getDeviceCount():
            mailboxes = PinnedMailboxes(shared, cupy)
    except RuntimeError as refused:  # CUDA's errors: no driver, memory that cannot be pinned
        error = f": {refused}"
    if not reduced(comm, mailboxes is not None, MPI.LAND):
        if mailboxes is not None:
            mailboxes.free()
        return PinningResult(None, f"CUDA cannot be used, or pins no memory, on some rank{error}")
    if mailboxes is None:
        raise AssertionError("a rank without pinned mailboxes agreed to them")
    device = int(cupy.cuda.Device().id)
    copies = mailboxes.copies(device)
    arrived = node is None or _token_arrives(node, copies, cupy)
    if node is None or nodes is not None:
        arrived &= _token_arrives_by_mpi(comm, copies, cupy)
    if not reduced(comm, arrived, MPI.LAND):
        mailboxes.free()
        return PinningResult(None, "a message between devices did not arrive")
    buses = comm.allgather(str(cupy.cuda.runtime.deviceGetPCIBusId(device)))
    return PinningResult(mailboxes, "", shares_gpu=nodes is None and len(set(buses)) == 1)


def _token_arrives(node: NodeMemory, copies: DeviceCopies, cupy: ModuleType) -> bool:
    """True if the token of the previous rank of the node arrives in this rank's device memory. Collective."""
    if node.size == 1:
        node.comm.Barrier()
        return True
    memory, before = node.channels[0], (node.place - 1) % node.size
    ours, theirs = (MPI.Get_address(memory.memory[place]) + memory.cells for place in (node.place, before))
    sent = _send_token(ours, node.place, copies, cupy)
    node.comm.Barrier()
    return sent and _token_enters(theirs, before, copies, cupy)


def _token_arrives_by_mpi(comm: MPI.Intracomm, copies: DeviceCopies, cupy: ModuleType) -> bool:
    """True if the token of the previous rank arrives in this rank's device memory, by MPI. Collective."""
    rank, size = comm.Get_rank(), comm.Get_size()
    out, into, sent, before = np.zeros(TOKEN, np.uint8), np.zeros(TOKEN, np.uint8), False, (rank - 1) % size
    with suppress(RuntimeError, MemoryError):  # memory that is not pinned
        out, into = (np.frombuffer(cupy.cuda.alloc_pinned_memory(TOKEN), np.uint8, TOKEN) for _ in range(2))
        sent = _send_token(MPI.Get_address(out), rank, copies, cupy)
    comm.Sendrecv(out, (rank + 1) % size, 0, into, before, 0)
    return sent and _token_enters(MPI.Get_address(into), before, copies, cupy)


def _send_token(host: int, number: int, copies: DeviceCopies, cupy: ModuleType) -> bool:
    """Copy a token (a number) out of device memory to the address `host`. False if CUDA refuses."""
    with suppress(RuntimeError, MemoryError):
        sent = cupy.asarray(_token(number))
        cupy.cuda.get_current_stream().synchronize()
        copies.to_host(host, [Iovec(sent.data.ptr, TOKEN)]).synchronize()
        return True
    return False


def _token_enters(host: int, number: int, copies: DeviceCopies, cupy: ModuleType) -> bool:
    """True if the token of a number, at the address `host`, can be copied into device memory."""
    with suppress(RuntimeError, MemoryError):
        received = cupy.zeros(TOKEN, np.uint8)
        cupy.cuda.get_current_stream().synchronize()
        copies.to_device([Iovec(received.data.ptr, TOKEN)], host).synchronize()
        return bool((received.get() == _token(number)).all())
    return False


def _token(number: int) -> np.ndarray:
    return np.full(TOKEN, 1 + number % 255, np.uint8)
