"""Chain replication: messages pass from the head to the tail in one order, and the tail answers. No MPI.

van Renesse and Schneider, OSDI 2004, for a server whose state is a function of the ordered messages:

    worker ---> head --at--> member --at--> tail ---> worker      the head numbers every message (`at`)
                head <-HELD- member <-HELD- tail                  a member keeps what the tail does not have yet

Every member runs a server on the same messages in the same order. Only the tail's answers are sent. So an answer
implies that the whole chain has the request. When a member dies,

* the next member becomes head. Requests that the dead head had not passed on were not answered and are sent again. A
  duplicate is answered but not applied, since a push is identified by its part.
* its predecessor resends what the tail does not have. The successor recognises duplicates by their number.
* the predecessor of a dead tail becomes tail. It submits messages that may be unanswered to the head again, in the
  name of their sender.

The head inserts the death of a worker as a numbered message, so all members handle it at the same position.

Assumptions: messages between two ranks keep their order. A rank reported as lost is dead, never returns, and nothing
arrives from it after the report.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from parallel.asynchronous.server.messages import Envelope, MessageKind, ServerMessage


class ReplicationChainLost(RuntimeError):
    """All members of a chain are dead."""


class ReplicationChains(list[tuple[int, ...]]):
    """List of every shard's replication chain: ranks of living members, head first, as known to this rank.

    The chain of shard i initially consists of the `replicas` servers i, i+1, ... around the ring.

    >>> chains = ReplicationChains([0, 1, 2], 2)
    >>> chains.lose(0)
    [0, 2]
    >>> chains[0], chains[1], chains[2]
    ((1,), (1, 2), (2,))
    """

    def __init__(self, servers: Sequence[int], replicas: int):
        ring = (*servers, *servers)
        super().__init__(ring[first : first + replicas] for first in range(len(servers)))

    def of(self, rank: int) -> list[int]:
        """Shards whose chains contain a server, by its position in them: its own first, before any server has died."""
        mine = [shard for shard in range(len(self)) if rank in self[shard]]
        return sorted(mine, key=lambda shard: self[shard].index(rank))

    def lose(self, rank: int) -> list[int]:
        """Remove a dead server from its chains. Returns their shards. `ReplicationChainLost` if one becomes empty."""
        concerned = self.of(rank)
        for shard in concerned:
            self[shard] = tuple(member for member in self[shard] if member != rank)
        if empty := [shard for shard in concerned if not self[shard]]:
            raise ReplicationChainLost(
                f"server {empty[0]} of {len(self)} is lost: rank {rank} was the last that had its parameters"
            )
        return sorted(concerned)


class ChainMember:
    """One server's membership in a chain: numbers messages if head, queues them in this order, and forwards them.

    The caller keeps `chains` up to date, and removes the messages for the member's server from `ordered`, in the
    chain's order. ``send(rank, message, *vectors)`` drops messages to dead ranks.
    """

    def __init__(self, me: int, shard: int, chains: ReplicationChains, send: Callable[..., Any]):
        self._me, self._shard, self._chains, self._send = me, shard, chains, send
        self._chain = chains[shard]
        self._count = self._held = 0  # messages of this member, and of the tail
        self._log: deque[Envelope] = deque()  # messages that the tail may not have
        self._unnumbered: deque[Envelope] = deque()
        self._dead: set[int] = set()
        self.ordered: deque[Envelope] = deque()

    @property
    def is_head(self) -> bool:
        return self._chain[0] == self._me

    @property
    def is_tail(self) -> bool:
        return self._chain[-1] == self._me

    def receive(self, envelope: Envelope) -> None:
        """Handle a message for this chain: queue and forward a request, or note which requests the tail has."""
        message = envelope.message
        if message.kind is MessageKind.HELD:
            self._mark_replicated(message.at)
        elif not message.at:
            self._unnumbered.append(envelope)
            self._number()
        elif message.at > self._count:
            assert message.at == self._count + 1, f"message {message.at} of shard {self._shard} after {self._count}"
            self._accept(envelope)
        else:
            self._report_held(envelope.source)

    def lost_worker(self, rank: int) -> None:
        self._dead.add(rank)
        if self.is_head:
            self._handle_death([rank])

    def lost_server(self) -> None:
        """Adapt to the death of a server, perhaps as new head or tail. `chains` must be up to date."""
        predecessor, successor = self._neighbours()
        self._chain = self._chains[self._shard]
        new_predecessor, new_successor = self._neighbours()
        # the new successor may lack what the dead one had not forwarded
        if new_successor != successor:
            for envelope in self._log:
                if new_successor is not None:
                    self._send(new_successor, envelope.message, *envelope.vectors)
                elif envelope.message.kind is not MessageKind.GONE:
                    self._send(self._chain[0], envelope.message._replace(at=0), *envelope.vectors)
            if new_successor is None:
                self._mark_replicated(self._count)
        if new_predecessor != predecessor:
            self._report_held(new_predecessor)
            if self.is_head:
                self._number()
                self._handle_death(sorted(self._dead))

    def _neighbours(self) -> tuple[int | None, int | None]:
        row = (None, *self._chain, None)
        place = row.index(self._me)
        return row[place - 1], row[place + 1]

    def _number(self) -> None:
        """If this is the head, number and accept waiting requests, except from dead ranks.

        They wait if their sender knows before this member that it is the head.
        """
        while self.is_head and self._unnumbered:
            envelope = self._unnumbered.popleft()
            sender = envelope.source if envelope.message.sender < 0 else envelope.message.sender
            if sender not in self._dead:
                self._accept(envelope._replace(message=envelope.message._replace(sender=sender, at=self._count + 1)))

    def _handle_death(self, workers: Sequence[int]) -> None:
        for worker in workers:
            message = ServerMessage(MessageKind.GONE, shard=self._shard, sender=worker, at=self._count + 1)
            self._accept(Envelope(self._me, message))

    def _accept(self, envelope: Envelope) -> None:
        message = envelope.message
        self._count = message.at
        if message.kind is MessageKind.GONE:
            self._dead.add(message.sender)
        _, successor = self._neighbours()
        if successor is not None:
            copied = envelope._replace(vectors=tuple(vector.copy() for vector in envelope.vectors))
            self._log.append(copied)
            self._send(successor, message, *copied.vectors)
        self.ordered.append(envelope._replace(source=message.sender))
        if successor is None:
            self._mark_replicated(self._count)

    def _mark_replicated(self, count: int) -> None:
        """Drop kept messages up to number `count`, since the tail has them, and report it to the predecessor."""
        while self._log and self._log[0].message.at <= count:
            self._log.popleft()
        if count > self._held:
            self._held = count
            predecessor, _ = self._neighbours()
            self._report_held(predecessor)

    def _report_held(self, rank: int | None) -> None:
        if rank is not None:
            self._send(rank, ServerMessage(MessageKind.HELD, shard=self._shard, at=self._held))
