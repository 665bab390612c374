"""The wires over MPI keep the contract that the loopback keeps."""

from functools import partial

import numpy as np
import pytest
from support.engines import order_weakly, use_interpreter
from support.fakes import cupy
from support.transport_contract import CONTRACT, piece

from collectives.buffers.device_memory import DeviceMemory
from collectives.buffers.memory import view
from collectives.engine.extension import available
from collectives.transport.gpu.device_copies import DeviceCopies, PinnedMailboxes
from collectives.transport.gpu.device_messages import DeviceNodeTransport
from collectives.transport.gpu.device_network import DeviceNetworkTransport, PinnedBuffers, largest_part
from collectives.transport.gpu.device_wire import DeviceTransport
from collectives.transport.gpu.exported_memory import ExportedMemory
from collectives.transport.gpu.peer_messages import PeerLinks, PeerTransport, connect
from collectives.transport.mpi.mpi_transport import MpiTransport
from collectives.transport.node import shm
from collectives.transport.node.mailbox import FAR_COPIED, MailboxEdge, open_mailboxes
from collectives.transport.node.placement import place_ranks
from collectives.transport.node.shm import NodeAwareTransport
from collectives.transport.node.staging_chunks import part_size, share_chunks

pytestmark = pytest.mark.ranks(1, 2)


class OnDevice(DeviceNodeTransport):
    """The transport of device memory; the stand-in's GPU takes the memory of the messages for its own."""

    def __init__(self, node, chunks=None):
        cupy.GPU.private = False
        self.mailboxes = PinnedMailboxes(node, cupy)
        device, copies = DeviceMemory(cupy.zeros(1)), self.mailboxes.copies(0)
        edges = {rank: MailboxEdge(node, 1, place) for rank, place in node.places.items()}
        super().__init__(node, 1, edges, 0, device, copies, chunks)
        self._taken = []

    def _cut(self, pieces):
        for address, nbytes in pieces:
            block = view(address, nbytes, np.dtype(np.uint8))
            self._taken.append(block)
            cupy.GPU.place(address, block, 0)
        return super()._cut(pieces)


class OnNetwork(DeviceNetworkTransport):
    """The transport of device memory between nodes, in the same way."""

    def __init__(self, comm):
        cupy.GPU.private = False
        copies, cut = DeviceCopies(cupy, 0), partial(part_size, most=largest_part(comm.Get_size()))
        super().__init__(comm, 3, DeviceMemory(cupy.zeros(1)), copies, PinnedBuffers(), cut)
        self._taken = []

    def adopt(self, pieces):
        for address, nbytes in pieces:
            block = view(address, nbytes, np.dtype(np.uint8))
            self._taken.append(block)
            cupy.GPU.place(address, block, 0)

    def outgoing(self, peer, pieces):
        self.adopt(pieces)
        return super().outgoing(peer, pieces)

    def incoming(self, peer, pieces):
        self.adopt(pieces)
        return super().incoming(peer, pieces)


def with_pairs(comm, node):
    """As if there were two ranks on each node."""
    near = [rank for rank in range(comm.Get_size()) if rank // 2 == comm.Get_rank() // 2]
    return DeviceTransport(OnDevice(node, share_chunks(node)), OnNetwork(comm), near)


OPENED = []
"""Device memory that other ranks may have open still."""


class BetweenDevices(PeerTransport):
    """The transport between GPUs; those of the stand-in take the memory of the messages for their own."""

    def __init__(self, comm, node, flags=True):
        cupy.GPU.private = False
        cupy.GPU.devices, cupy.GPU.device = comm.Get_size(), comm.Get_rank()
        self.mailboxes, self._taken = PeerLinks(node, cupy, ExportedMemory(cupy, comm.Get_rank()), flags), []
        OPENED.append(self.mailboxes)
        assert not connect(comm, self.mailboxes) and self.mailboxes.flags == flags
        edges = {rank: MailboxEdge(node, 1, place) for rank, place in node.places.items()}
        super().__init__(1, edges, 0, DeviceMemory(cupy.zeros(1)), self.mailboxes)

    def _cut(self, pieces):
        for address, nbytes in pieces:
            block = view(address, nbytes, np.dtype(np.uint8))
            self._taken.append(block)
            cupy.GPU.place(address, block, cupy.GPU.device)
        return super()._cut(pieces)


WIRES = {
    "peer": lambda comm, node: BetweenDevices(comm, node),
    "peer, without flags": lambda comm, node: BetweenDevices(comm, node, flags=False),
    "device": lambda comm, node: OnDevice(node),
    "device, chunks": lambda comm, node: OnDevice(node, share_chunks(node)),
    "device, between nodes": lambda comm, node: OnNetwork(comm),
    "device, several nodes": lambda comm, node: with_pairs(comm, node),
    "network": lambda comm, node: MpiTransport(comm, 3),
    "shared": lambda comm, node: mailboxes(comm, node),
    "far cores": lambda comm, node: mailboxes(comm, far(node)),
    "symmetric": lambda comm, node: Told(comm, unreadable(node)),
}

ENGINES = {
    "compiled": lambda world, patch: None,
    "interpreted": lambda world, patch: use_interpreter(patch),
    "mixed": lambda world, patch: use_interpreter(patch) if world.rank % 2 else None,
    "weakly ordered": lambda world, patch: order_weakly(patch),
}


def mailboxes(comm, node):
    edges = {rank: MailboxEdge(node, 1, place) for rank, place in node.places.items()}
    return NodeAwareTransport(node, 1, edges, MpiTransport(comm, 3), node.streamed)


def far(node):
    """As between cores for which copies into cells are slow."""
    node.copied = node.copied_compiled = FAR_COPIED
    return node


class Unreadable:
    """A process whose memory cannot be read."""

    pid = -1

    def read(self, *_):
        raise OSError("this memory is private")


def unreadable(node):
    """As where the kernel lets no rank read another's memory."""
    node.reads = node.writes = False
    node.readers = [Unreadable() for _ in node.readers]
    return node


class Told:
    """A wire whose messages leave out of symmetric memory, into which they are copied as they start."""

    def __init__(self, comm, node):
        self._room, self._used = node.heap.allocate(1 << 23), 0
        self._wire = mailboxes(comm, node)
        self._copies, self._messages = {}, []

    def send(self, peer, pieces, stable=True):
        copies, seen = [], []
        for address, nbytes in (one.iovec for one in pieces):
            array = self._room[self._used : self._used + nbytes]
            self._used += nbytes
            copies.append(partial(np.copyto, array, view(address, nbytes, np.dtype(np.uint8))))
            seen.append(piece(array))
        message = self._wire.send(peer, seen, stable)
        near = self._wire.split_size(peer, 0) is not None
        assert not near or message.read is not None or not sum(one.nbytes for one in pieces)
        self._copies[id(message)] = copies  # an MPI request cannot be a key
        self._messages.append(message)
        return message

    def prepare(self, messages):
        for message in messages:
            for copy in self._copies.get(id(message), ()):
                copy()

    def __getattr__(self, name):
        return getattr(self._wire, name)


HOST_WIRES = "network", "shared", "far cores", "symmetric"
CASES = [(kind, engine) for kind in WIRES for engine in (ENGINES if kind in HOST_WIRES else ["compiled"])]


@pytest.mark.parametrize(("kind", "engine"), CASES)
@pytest.mark.parametrize("program", CONTRACT, ids=lambda program: program.__name__)
def test_contract(world, monkeypatch, gpu, kind, engine, program):
    if engine == "compiled" and not available():
        pytest.skip("this installation has no compiled engine")
    ENGINES[engine](world, monkeypatch)
    if kind == "symmetric":
        monkeypatch.setattr(shm, "RENDEZVOUS_BYTES", 1)
    own = world.Dup()
    node = open_mailboxes(own, place_ranks(own, True, None), True, 0).node
    wire = WIRES[kind](own, node)
    program(world.rank, world.size, wire)
    wire.free()
    node.free()
    own.Free()
