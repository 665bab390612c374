"""Distribution of a server's messages to its replication chains: its own shard's, and those it replicates. No MPI."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from parallel.asynchronous.server.messages import Awaits, Envelope, Mail, MessageHandle, MessageKind, ServerMessage
from parallel.asynchronous.server.replication_chain import ChainMember, ReplicationChainLost, ReplicationChains
from parallel.asynchronous.server.server_loop import ServerLoop

MakeServer = Callable[[Mail, int], ServerLoop]


class ServerReplicas:
    """Servers of all shards that a rank stores, its own first, then replicas. ``make(mail, shard)`` makes each.

    A mail's `poll` raises `ReplicationChainLost` if the last server of some parameters is dead.
    """

    def __init__(
        self, bus: Mail, me: int, servers: Sequence[int], workers: Sequence[int], replicas: int, make: MakeServer
    ):
        self.bus, self.me, self.ranks, self._workers = bus, me, list(servers), set(workers)
        self.chains = ReplicationChains(servers, replicas)
        self.mails = {shard: ShardMail(self, shard) for shard in self.chains.of(me)}
        self.own = next(iter(self.mails.values()))
        self.servers = {shard: make(mail, shard) for shard, mail in self.mails.items()}
        self._to_self: deque[Envelope] = deque()
        self._left: set[int] = set()
        self._failed = False
        bus.accept = self._receive_buffers

    def send(self, rank: int, message: ServerMessage, *vectors: Any) -> MessageHandle:
        """Send a message to a rank, possibly this one. After a PROBLEM (failure) other messages are dropped."""
        self._failed |= message.kind is MessageKind.PROBLEM
        if self._failed and message.kind is not MessageKind.PROBLEM:
            return MessageHandle()
        if rank != self.me:
            return self.bus.send(rank, message, *vectors)
        self._to_self.append(Envelope(rank, message, tuple(vector.copy() for vector in vectors)))
        return MessageHandle()

    def dispatch(self) -> bool:
        envelope = self._to_self.popleft() if self._to_self else self.bus.poll()
        if envelope is None:
            return False
        kind = envelope.message.kind
        if kind is MessageKind.LOST:
            self._handle_death(envelope.source)
        elif kind is MessageKind.BYE:
            self._left.add(envelope.source)
        elif kind is MessageKind.PROBLEM:
            self.own.member.ordered.append(envelope)
        else:
            self.mails[envelope.message.shard].member.receive(envelope)
        # replicas have no loop of their own: they apply messages as these arrive
        for shard, mail in self.mails.items():
            if mail.member.ordered and mail is not self.own:
                self.servers[shard].catch_up()
        return True

    def until(self, enough: Callable[[], bool]) -> None:
        """Serve all shards until ``enough()``, or no worker needs this rank any more."""
        self._serve(lambda: enough() or self._left >= self._workers)

    def until_left(self) -> None:
        """Serve all shards until no rank needs this one any more. Chains lost meanwhile are ignored."""
        others = set(self.ranks) - {self.me}
        self._serve_until_left(self._workers)
        for rank in others:
            self.bus.send(rank, ServerMessage(MessageKind.BYE))
        self._serve_until_left(others)

    def _serve_until_left(self, ranks: set[int]) -> None:
        while not self._left >= ranks:
            with suppress(ReplicationChainLost):
                self._serve(lambda: self._left >= ranks)

    def _serve(self, enough: Callable[[], bool]) -> None:
        while not enough():
            self.servers[self.own.shard].catch_up()
            self.bus.idle(lambda: dict.fromkeys((self._workers | set(self.ranks)) - self._left - {self.me}, "messages"))

    def _handle_death(self, rank: int) -> None:
        self.own.member.ordered.append(Envelope(rank, ServerMessage(MessageKind.LOST)))
        self._left.add(rank)
        if rank in self._workers:
            for mail in self.mails.values():
                mail.member.lost_worker(rank)
            return
        for shard in self.chains.lose(rank):
            if shard in self.mails:
                self.mails[shard].member.lost_server()
        for shard, mail in self.mails.items():
            mail.resend()
            self.servers[shard].remind()

    def _receive_buffers(self, source: int, message: ServerMessage) -> Sequence[Any]:
        return self.mails[message.shard].accept(source, message)


class ShardMail(Mail):
    """Message bus of one shard's server: messages arrive in the chain's order. Only the tail sends, PROBLEM apart."""

    def __init__(self, replicas: ServerReplicas, shard: int):
        self._replicas, self.shard = replicas, shard
        self.member = ChainMember(replicas.me, shard, replicas.chains, replicas.send)
        self._last_sent: dict[int, tuple[ServerMessage, tuple[Any, ...]]] = {}

    def send(self, peer: int, message: ServerMessage, *vectors: Any) -> MessageHandle:
        """As the chain's tail, send to a worker or the head of another shard's chain.

        Otherwise only PROBLEM is sent.
        """
        ranks, is_problem = self._replicas.ranks, message.kind is MessageKind.PROBLEM
        if peer in ranks and not is_problem:
            shard = ranks.index(peer)
            self._last_sent[shard] = message._replace(shard=shard, sender=ranks[self.shard]), vectors
            return self._send_to_shard(shard) if self.member.is_tail else MessageHandle()
        return self._replicas.send(peer, message, *vectors) if self.member.is_tail or is_problem else MessageHandle()

    def resend(self) -> None:
        """Resend the last message to each other shard, if this is the tail: a dead server may have lost it."""
        for shard in self._last_sent if self.member.is_tail else ():
            self._send_to_shard(shard)

    def poll(self) -> Envelope | None:
        while not self.member.ordered:
            if self is not self._replicas.own or not self._replicas.dispatch():
                return None
        return self.member.ordered.popleft()

    def idle(self, awaits: Awaits) -> None:
        self._replicas.bus.idle(awaits)

    def _send_to_shard(self, shard: int) -> MessageHandle:
        chain, (message, vectors) = self._replicas.chains[shard], self._last_sent[shard]
        if not chain:  # lost, and the training will end
            return MessageHandle()
        return self._replicas.send(chain[0], message, *vectors)
