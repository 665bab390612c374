"""Shared-memory transport: no system call for short messages, one copy for long ones.

Messages pass through mailboxes (`mailbox`). The sender chooses how, from local knowledge only, and the flag of the slot
is labelled accordingly:

- a short message is beside the flag, in the same cache line;
- a medium one is in the slot's cell: the sender copies in, the receiver copies or reduces directly out of it;
- of a long one, and of a medium one in memory that the receiver has mapped (`shared_heap`), the slot holds only the
  address: the receiver reads it there, or from the sender's process (`cross_memory`), and the sender may overwrite it
  after the acknowledgement.

A message that finds no free slot queues. A rank that waits sends its queued messages, receives messages in order of
arrival, and drives MPI progress, so that no rank waits with work left that others need.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.buffers.memory import view
from collectives.transport.compiled_exchange import RENDEZVOUS_BYTES
from collectives.transport.fused_exchange import FusedExchange
from collectives.transport.mailbox import ADDRESSES, CELLS, SLOTS, MailboxEdge, NodeMemory
from collectives.transport.mpi_transport import PersistentTransport
from collectives.transport.shm_messages import (
    BYTE,
    Combination,
    EagerSend,
    Receive,
    RendezvousRead,
    RendezvousSend,
    as_words,
)
from collectives.transport.wire import Iovec, pause
from collectives.types import Wait

STREAMED = 1 << 19
"""Bytes up to which messages go through cells; longer ones are read by cross-memory attach, if permitted."""

_MESSAGES = (EagerSend, RendezvousSend, Receive)


class NodeAwareTransport:
    """Transport: one channel of the mailboxes in shared memory within a node; MPI (`network`) between nodes.

    `edges` of the channel, by peer, are created on first use. `compiles`: exchanges are frequent enough to be compiled.
    `shared`: nearly all send buffers are in memory that the receiver has mapped, so that no message is cut; equal at
    both ends of every edge. `mark` is a number below `MARKS` that both ends of every edge compute from the call: a
    message with another mark raises.
    """

    def __init__(
        self,
        node: NodeMemory,
        channel: int,
        edges: dict[int, MailboxEdge],
        network: PersistentTransport,
        compiles: bool = False,
        shared: bool = False,
        mark: int = 0,
    ) -> None:
        self._node, self._channel, self._edges, self._network = node, channel, edges, network
        self._compiles, self.mark = compiles, mark
        self._streamed = 0 if shared else STREAMED

    def _edge(self, peer: int) -> MailboxEdge:
        edge = self._edges.get(peer)
        if edge is None:
            edge = self._edges[peer] = MailboxEdge(self._node, self._channel, self._node.places[peer])
        return edge

    def send(self, peer: int, pieces: Sequence[Iovec], stable: bool = True) -> Any:
        if not self._node.reaches(peer):
            return self._network.send(peer, pieces, stable)
        edge = self._edge(peer)
        nbytes = sum(piece.nbytes for piece in pieces)
        if nbytes > edge.cell or (nbytes >= RENDEZVOUS_BYTES and stable and self._is_shared(pieces)):
            return RendezvousSend(edge, pieces, self.mark)
        return EagerSend(edge, pieces, self.mark)

    def _is_shared(self, pieces: Sequence[Iovec]) -> bool:
        """True if the peers have mapped all pieces, and their addresses fit in a slot."""
        return len(pieces) <= ADDRESSES and all(self._node.heap.is_shared(*piece) for piece in pieces)

    def receive(self, peer: int, pieces: Sequence[Iovec]) -> Any:
        if not self._node.reaches(peer):
            return self._network.receive(peer, pieces)
        edge = self._edge(peer)
        targets = [view(*piece, BYTE) for piece in pieces]
        takes = self._takes(edge, targets, lambda index, source: partial(np.copyto, *as_words(targets[index], source)))
        return Receive(edge, takes, RendezvousRead(edge, targets, None), self.mark)

    def combine(
        self, peer: int, rows: Sequence[tuple[Any, Any]], bind: Callable[[Any, Any, Any], Callable[[], object]]
    ) -> Receive:
        edge, dtype = self._edge(peer), rows[0][0].dtype
        outs = [out for _, out in rows]
        takes = self._takes(edge, outs, lambda index, source: bind(source.view(dtype), *rows[index]))
        return Receive(edge, takes, RendezvousRead(edge, outs, Combination(rows, bind)), self.mark)

    def _takes(
        self, edge: MailboxEdge, targets: Sequence[np.ndarray], take: Callable[[int, Any], Callable[[], object]]
    ) -> list[list[Callable[[], object]]]:
        """Receiving functions of each slot, ``take(index, data)`` per target; none for messages longer than a cell."""
        takes: list[list[Callable[[], object]]] = [[] for _ in range(SLOTS)]
        nbytes = sum(target.nbytes for target in targets)
        if nbytes <= edge.cell:
            memory = self._node.bytes[edge.place]
            for slot, calls in enumerate(takes):
                start = edge.slot_in(slot, nbytes)
                for index, target in enumerate(targets):
                    calls.append(take(index, memory[start : start + target.nbytes]))
                    start += target.nbytes
        return takes

    def split_size(self, peer: int, nbytes: int) -> int | None:
        if not self._node.reaches(peer):
            return None
        cell = self._node.cells[self._channel]
        whole = nbytes <= cell or (nbytes > self._streamed and self._node.reads)
        return 0 if whole else cell

    def completes_locally(self, peer: int, nbytes: int, before: int) -> bool:
        return self._node.reaches(peer) and nbytes <= self._node.cells[self._channel] and before < CELLS

    def _split(self, messages: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Split messages into those in shared memory and those over the network."""
        shared = [message for message in messages if isinstance(message, _MESSAGES)]
        return shared, [message for message in messages if not isinstance(message, _MESSAGES)]

    def start_calls(self, messages: Sequence[Any]) -> Sequence[Callable[[], object]]:
        """Functions that start messages; sends to a peer beyond the first `CELLS` are started by the wait."""
        shared, network = self._split(messages)
        starts = list(self._network.start_calls(network))
        earlier: dict[MailboxEdge, int] = defaultdict(int)
        for message in shared:
            if not isinstance(message, Receive):
                message.late = earlier[message.edge] >= CELLS
                earlier[message.edge] += 1
            if isinstance(message, Receive) or not message.late:
                starts.append(message.start)
        return starts

    def wait_calls(self, messages: Sequence[Any]) -> Sequence[Wait]:
        shared, network = self._split(messages)
        waits = [*self._network.wait_calls(network), *self._shared_waits(shared)]
        return [_wait_for_all(waits)] if shared and network else waits

    def _shared_waits(self, messages: Sequence[Any]) -> Sequence[Wait]:
        receives = [message for message in messages if isinstance(message, Receive)]
        sends = [message for message in messages if not isinstance(message, Receive)]
        late = [message for message in sends if message.late]
        if late:
            return [_streaming(late, receives, sends)]
        eager: list[Any] = [message for message in sends if isinstance(message, EagerSend)]
        by_address = [message for message in sends if isinstance(message, RendezvousSend)]
        # A reduction may overwrite memory that an eager send must have copied before.
        reduces = any(message.combines for message in receives)
        order = (*eager, *receives, *by_address) if reduces else (*receives, *eager, *by_address)
        return [Wait(message.wait, message.test) for message in order]

    def swap(self, messages: Sequence[Any]) -> FusedExchange | None:
        sends = [message for message in messages if isinstance(message, EagerSend)]
        receives = [message for message in messages if isinstance(message, Receive)]
        eager = len(sends) + len(receives) == len(messages)
        if self._node.fence is not None or not eager or len(sends) > 1 or len(receives) > 1:
            return None
        send, receive = next(iter(sends), None), next(iter(receives), None)
        return FusedExchange(send, receive, self._channel > 0, self._compiles)

    def free(self) -> None:
        """Free the network's requests; the mailboxes belong to the node."""
        self._network.free()


def _streaming(late: Sequence[Any], receives: Sequence[Any], sends: Sequence[Any]) -> Wait:
    """Wait and test of messages cut into parts: start `late` sends as slots become free, and receive parts."""
    queues: list[list[list[Any]]] = []  # of late sends and of receives, by peer, the next message last

    def by_edge(messages: Sequence[Any]) -> list[list[Any]]:
        found: dict[MailboxEdge, list[Any]] = defaultdict(list)
        for message in reversed(messages):
            found[message.edge].append(message)
        return list(found.values())

    def test() -> bool:
        if not queues:
            queues.extend([by_edge(late), by_edge(receives)])
        progress = True
        while progress:
            progress = False
            late[0].edge.node.flush()
            for queue in queues[0]:
                if queue and not queue[-1].edge.queue and queue[-1].edge.has_room():
                    queue.pop().start()
                    progress = True
            for queue in queues[1]:
                if queue and queue[-1].test():
                    queue.pop()
                    progress = True
        if any(map(any, queues)) or not all([message.test() for message in sends]):
            return False
        queues.clear()
        return True

    def wait() -> None:
        spins, node = late[0].edge.spins, late[0].edge.node
        while not test():
            spins -= 1
            if spins < 0:
                node.yielding(-spins)

    return Wait(wait, test)


def _wait_for_all(waits: Sequence[Wait]) -> Wait:
    """Combine several waits into one that polls all in turn, so that MPI progresses while a flag is polled."""
    pending = list(waits)

    def test() -> bool:
        pending[:] = [wait for wait in pending if not wait.test()]
        if pending:
            return False
        pending.extend(waits)
        return True

    def wait() -> None:
        turn = 0
        while not test():
            pause(turn := turn + 1)

    return Wait(wait, test)
