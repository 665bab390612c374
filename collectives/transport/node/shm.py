"""Shared-memory transport: no system call for short messages, one copy for long ones.

Messages pass through mailboxes (`mailbox`). The sender chooses how, from local knowledge only, and labels the flag of
the slot accordingly:

- a short message is beside the flag, in the same cache line.
- a medium one is in the slot's bounce buffer: the sender copies in, the receiver copies or reduces directly out of it.
- for a long one, and a medium one in memory that the receiver has mapped (`shared_heap`), the slot holds only the
  address: the receiver reads the mapped memory, or the sender's process. The sender may overwrite it after the
  acknowledgement.

Messages are rows of the engine, in one stream for each peer and direction.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.engine.assembly import Instruction, MemoryOperand, OnMemories, Place, calling
from collectives.engine.instructions import ABSOLUTE, ADDRESSES, SLOTS, Kind
from collectives.transport.memory.shared_heap import MOST
from collectives.transport.mpi.mpi_transport import MpiTransport
from collectives.transport.node.mailbox import RENDEZVOUS_BYTES, MailboxEdge, NodeMemory, address_label, label
from collectives.transport.node.staging_chunks import HostChunkSend, StagingChunks, part_size
from collectives.transport.waits import Pauses
from collectives.transport.wire import BoundMessage, Combining, Packing, Piece, Wire

BYTE = np.dtype(np.uint8)


class NodeAwareTransport(Wire):
    """Transport: one channel of the mailboxes in shared memory within a node. MPI (`network`) between nodes.

    `edges` are the channel's, by rank of the node. `streamed`: bytes up to which messages are cut to go through bounce
    buffers. Equal at both ends of every edge. `mark` is a number below `MARKS` that both ends of every edge compute
    from the call: a message with another mark raises. With `chunks` (a device may be at the other end), messages
    longer than a bounce buffer are cut for them, independent of `streamed`.
    """

    in_mailboxes = True

    def __init__(
        self,
        node: NodeMemory,
        channel: int,
        edges: dict[int, MailboxEdge],
        network: MpiTransport,
        streamed: int,
        mark: int = 0,
        chunks: StagingChunks | None = None,
        itemsize: int = 1,
    ) -> None:
        self.node, self._channel, self._edges, self._network = node, channel, edges, network
        self.mark = mark
        self.streamed, self._chunks = streamed, chunks
        self.cell_bytes, itemsize = int(node.cells[channel]), max(1, itemsize)
        self.part_bytes = int(min(self.cell_bytes, node.part)) // itemsize * itemsize  # as many elements as fit
        self._packed: list[np.ndarray] = []

    def send(self, peer: int, pieces: Sequence[Piece], stable: bool = True) -> BoundMessage:
        if peer not in self._edges:
            return self._network.send(peer, pieces, stable)
        edge, nbytes = self._edges[peer], sum(piece.nbytes for piece in pieces)
        key = "out", edge.place
        is_long = nbytes > self.node.cells[self._channel]
        if self._chunks is not None and is_long and not self.node.reads:
            send = HostChunkSend(self._chunks, edge, nbytes, self.mark)
            whole = OnMemories(send.bind, [(piece.place, piece.nbytes) for piece in pieces], BYTE)
            return BoundMessage([calling(whole)], [], key)
        starts, part = [], self.part(nbytes)
        # the flag has room for few addresses, so many pieces are copied together first
        if is_long and not part and len(pieces) > ADDRESSES:
            packed = np.empty(nbytes, BYTE)
            self._packed.append(packed)
            ends = accumulate((piece.nbytes for piece in pieces), initial=MPI.Get_address(packed))
            operands = [
                MemoryOperand(piece.nbytes, piece.place, out=Place(ABSOLUTE, at)) for piece, at in zip(pieces, ends)
            ]
            starts.append(Instruction(Kind.LOCAL, operands))
            pieces = [Piece(nbytes, Place(ABSOLUTE, MPI.Get_address(packed)), 0)]
        is_long_enough = nbytes >= RENDEZVOUS_BYTES or self.lengths_vary
        waits = stable or (self.lengths_vary and not self.all_short)  # it may be too long for a bounce buffer
        may_choose = waits and is_long_enough and len(pieces) <= ADDRESSES
        send_row = Instruction(
            Kind.SEND,
            [MemoryOperand(piece.nbytes, piece.place) for piece in pieces],
            link=edge,
            label=label(self.mark, nbytes),
            address_label=address_label(self.mark) if may_choose or (is_long and not part) else 0,
            part=part,
        )
        read = Instruction(Kind.WAIT_READ, link=edge, after=send_row) if send_row.address_label else None
        return BoundMessage([*starts, send_row], [], key, read)

    def vary(self, all_short: bool, packing: Packing) -> None:
        super().vary(all_short, packing)
        self._network.vary(all_short, packing)

    def receive(self, peer: int, pieces: Sequence[Piece]) -> BoundMessage:
        if peer not in self._edges:
            return self._network.receive(peer, pieces)
        return self._receive(peer, [MemoryOperand(piece.nbytes, out=piece.place) for piece in pieces])

    def combine(self, peer: int, pairs: Sequence[tuple[Piece, Piece]], how: Combining) -> BoundMessage:
        operands = [MemoryOperand(out.nbytes, mine.place, out=out.place) for mine, out in pairs]
        return self._receive(peer, operands, reduction=how.reduction, mine_first=how.mine_first)

    def _receive(self, peer: int, operands: Sequence[MemoryOperand], **how: Any) -> BoundMessage:
        edge, nbytes = self._edges[peer], sum(operand.nbytes for operand in operands)
        labels = label(self.mark, nbytes), address_label(self.mark)
        receive = Instruction(Kind.RECV, operands, edge, *labels, part=self.part(nbytes), **how)
        return BoundMessage([receive], [], ("in", edge.place))

    def guard_root(self) -> list[list[Instruction]]:
        """Streams that let the first round of a root find messages of earlier calls: no peer can send before the root

        does. A rank with another root sends to that rank, where nothing receives the message.
        """
        edges = (edge for edge in self._edges.values() if edge.place != self.node.place)
        return [[Instruction(Kind.EXPECT_NONE, link=edge)] for edge in edges]

    def split_size(self, peer: int, nbytes: int) -> int | None:
        if peer not in self._edges:
            return None
        cell = self.node.cells[self._channel]
        if not self.meets_devices or nbytes <= cell:
            return 0
        return cell if self._chunks is None else part_size(nbytes)

    def part(self, nbytes: int) -> int:
        """Bytes of the parts in which a message travels through bounce buffers. 0: in one. Equal at both ends."""
        if self.meets_devices or nbytes <= self.part_bytes or (nbytes > self.streamed and self.node.reads):
            return 0
        return self.part_bytes

    @property
    def meets_devices(self) -> bool:
        """A message may be in a device's memory at the other end, where programs cut it."""
        return self._chunks is not None or self.streamed >= MOST

    def segment_size(self, nbytes: int, usual: int) -> int:
        return self._network.segment_size(nbytes, usual)

    def completes_locally(self, peer: int, nbytes: int, before: int) -> bool:
        is_short = self.all_short if self.lengths_vary else nbytes <= self.cell_bytes
        return peer in self._edges and is_short and before < SLOTS

    def yielding(self, pauses: Pauses) -> None:
        self.node.yielding(pauses)

    def use_tag(self, tag: int) -> None:
        self._network.use_tag(tag)

    def free(self) -> None:
        """Free the network's requests. The mailboxes belong to the node."""
        self._network.free()
