"""Shared-memory transport: no system call for short messages, one copy for long ones.

Messages pass through mailboxes (`mailbox`). The sender chooses how, from local knowledge only, and the flag of the slot
is labelled accordingly:

- a short message is beside the flag, in the same cache line;
- a medium one is in the slot's cell: the sender copies in, the receiver copies or reduces directly out of it;
- of a long one, and of a medium one in memory that the receiver has mapped (`shared_heap`), the slot holds only the
  address: the receiver reads it there, or from the sender's process (`cross_memory`), and the sender may overwrite it
  after the acknowledgement.

Messages run as operations of an `exchange`, in order for each peer and direction.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.buffers.memory import view
from collectives.engine.instructions import SLOTS
from collectives.transport.exchange import Exchange, Stream
from collectives.transport.mailbox import MailboxEdge, NodeMemory
from collectives.transport.mpi_transport import ImmediateTransport, PersistentMessage, PersistentTransport
from collectives.transport.shm_messages import (
    BYTE,
    Combination,
    MailboxReceive,
    MailboxSend,
    NothingUnread,
    RendezvousRead,
    as_words,
)
from collectives.transport.staging_chunks import HostChunkSend, StagingChunks, part_size
from collectives.transport.wire import Iovec, Reduction
from collectives.types import Wait


class NodeAwareTransport:
    """Transport: one channel of the mailboxes in shared memory within a node; MPI (`network`) between nodes.

    `edges` are those of the channel, by rank of the node. `streamed`: bytes up to which messages are cut to go
    through cells; equal at both ends of every edge. `mark` is a number below `MARKS` that both ends of every edge
    compute from the call: a message with another mark raises. With `chunks`, where a device may be at the
    other end, messages longer than a cell are cut for these, whatever `streamed` is.
    """

    in_mailboxes = True

    def __init__(
        self,
        node: NodeMemory,
        channel: int,
        edges: dict[int, MailboxEdge],
        network: PersistentTransport | ImmediateTransport,
        streamed: int,
        mark: int = 0,
        chunks: StagingChunks | None = None,
    ) -> None:
        self.node, self._channel, self._edges, self._network = node, channel, edges, network
        self.mark = mark
        self._streamed, self._chunks = streamed, chunks

    def send(self, peer: int, pieces: Sequence[Iovec], stable: bool = True) -> Any:
        if peer not in self._edges:
            return self._network.send(peer, pieces, stable)
        is_long = sum(piece.nbytes for piece in pieces) > self.node.cells[self._channel]
        if self._chunks is not None and is_long and not self.node.reads:
            return HostChunkSend(self._chunks, self._edges[peer], pieces, self.mark)
        return MailboxSend(self._edges[peer], pieces, self.mark, stable)

    def receive(self, peer: int, pieces: Sequence[Iovec]) -> Any:
        if peer not in self._edges:
            return self._network.receive(peer, pieces)
        edge = self._edges[peer]
        targets = [view(*piece, BYTE) for piece in pieces]

        def take(parts: Sequence[np.ndarray]) -> Sequence[Callable[[], object]]:
            return [partial(np.copyto, *as_words(*pair)) for pair in zip(targets, parts)]

        return MailboxReceive(edge, take, RendezvousRead(edge, targets, None), self.mark)

    def combine(self, peer: int, rows: Sequence[tuple[Any, Any]], bind: Reduction) -> MailboxReceive:
        edge, dtype = self._edges[peer], rows[0][0].dtype
        outs = [out for _, out in rows]

        def take(parts: Sequence[np.ndarray]) -> Sequence[Callable[[], object]]:
            return [bind(part.view(dtype), *row) for part, row in zip(parts, rows)]

        return MailboxReceive(edge, take, RendezvousRead(edge, outs, Combination(rows, bind)), self.mark)

    def guard_root(self, exchange: Exchange) -> None:
        """Let the first exchange of a root find messages of earlier calls: no peer can send before the root does.

        A rank that takes another rank for the root sends to that one, which does not receive.
        """
        for edge in self._edges.values():
            if edge.place != self.node.place:
                stream = Stream()
                stream.add(NothingUnread(edge))
                exchange.prepend(stream)

    def split_size(self, peer: int, nbytes: int) -> int | None:
        if peer not in self._edges:
            return None
        cell = self.node.cells[self._channel]
        if self._chunks is not None:
            return part_size(nbytes) if nbytes > cell else 0
        part = min(cell, self.node.part)
        return 0 if nbytes <= part or (nbytes > self._streamed and self.node.reads) else part

    def segment_size(self, nbytes: int, usual: int) -> int:
        return self._network.segment_size(nbytes, usual)

    def completes_locally(self, peer: int, nbytes: int, before: int) -> bool:
        return peer in self._edges and nbytes <= self.node.cells[self._channel] and before < SLOTS

    def stream_key(self, message: Any) -> tuple[str, int] | None:
        """Direction and node rank of a message through a mailbox, whose order matters; None for the network's."""
        if isinstance(message, MailboxReceive):
            return "in", message.edge.place
        return ("out", message.edge.place) if isinstance(message, (MailboxSend, HostChunkSend)) else None

    def start_calls(self, messages: Sequence[Any]) -> Sequence[Callable[[], object]]:
        return self._network.start_calls(messages)

    def wait_calls(self, messages: Sequence[Any]) -> Sequence[Wait]:
        return self._network.wait_calls(messages)

    def describe(self, message: Any) -> PersistentMessage | None:
        return self._network.describe(message)

    def use_tag(self, tag: int) -> None:
        self._network.use_tag(tag)

    def free(self) -> None:
        """Free the network's requests; the mailboxes belong to the node."""
        self._network.free()
