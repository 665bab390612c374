"""A node whose ranks are all in this process: mailboxes in plain memory, which both engines use."""

import os

import numpy as np

from collectives.engine.cross_memory import CrossMemoryAttach
from collectives.engine.instructions import LINE, RECEIVED, SENT, SHORT_SPACING, SLOTS
from collectives.transport.node.mailbox import ChannelMemory, MailboxEdge, NodeMemory
from collectives.transport.node.shm import NodeAwareTransport
from collectives.transport.wire import NoMessages

CELL, SHORT = 1 << 10, 1 << 7


class _Heap:
    """Memory of each rank that the others have mapped, at the same addresses."""

    def __init__(self, size):
        self.mapped = [[] for _ in range(size)]

    def segments(self, place):
        return [(array.ctypes.data, array.view(np.uint8)) for array in self.mapped[place]]


class PlainNode(NodeMemory):
    """The mailboxes of all ranks, as one of them has them; there is one channel."""

    reads, writes, shares_cores, spins = True, False, True, 0

    def __init__(self, place, memory, heap, cell, short, part):
        self.place, self.size, self.heap, self.part = place, len(memory), heap, part
        self.places = {rank: rank for rank in range(self.size)}
        self.readers = [CrossMemoryAttach(os.getpid())] * self.size
        self.cells, self.short, self.box = [cell], [short], LINE * (SLOTS + 2)
        self.copied = self.copied_compiled = self.streamed = cell
        self.far = False
        words = [one.data.cast("B").cast("q") for one in memory]
        self.channels = {0: ChannelMemory(memory, words, 0, self.size * self.box)}

    def yielding(self, pauses):
        """The other ranks are in this thread: a wait would never end."""
        raise AssertionError("a rank waits")


class PlainHub:
    """Transports of the ranks; `mark` is that of the calls, `part` and `streamed` cut messages."""

    def __init__(self, size, cell=CELL, short=SHORT, part=CELL, streamed=0, mark=5):
        nbytes = size * (LINE * (SLOTS + 2) + SLOTS * cell + SLOTS * SHORT_SPACING * short)
        self.size, self.mark, self._streamed = size, mark, streamed
        self.memory, self.heap = [np.zeros(nbytes, np.uint8) for _ in range(size)], _Heap(size)
        self.nodes = [PlainNode(rank, self.memory, self.heap, cell, short, part) for rank in range(size)]
        self.edges = [{} for _ in range(size)]

    def wire(self, rank, mark=None):
        edges = self.edges[rank] or {peer: MailboxEdge(self.nodes[rank], 0, peer) for peer in range(self.size)}
        self.edges[rank] = edges
        mark = self.mark if mark is None else mark
        return NodeAwareTransport(self.nodes[rank], 0, edges, NoMessages(), self._streamed, mark)

    def map(self, rank, array):
        """Let all others map an array of a rank."""
        self.heap.mapped[rank].append(array)
        for edge in (edge for edges in self.edges for edge in edges.values()):
            edge.update_segments()

    def reset(self):
        """Let no message have been sent."""
        for memory in self.memory:
            memory[:] = 0
        for edge in (edge for edges in self.edges for edge in edges.values()):
            for word in ("sent", "acknowledged", "received", "offered", "taken"):
                edge.link[word] = 0

    def state(self):
        """All bytes of the mailboxes, and the numbers of messages."""
        counts = [[edge.counts[word] for word in (SENT, RECEIVED)] for edges in self.edges for edge in edges.values()]
        return [one.tobytes() for one in self.memory], counts
