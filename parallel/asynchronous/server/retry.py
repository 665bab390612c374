"""Worker's messages to servers that may die: kept until answered, and resent to the successor. No MPI."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallel.asynchronous.server.messages import Awaits, Envelope, Mail, MessageHandle, MessageKind, ServerMessage
from parallel.asynchronous.server.replication_chain import ReplicationChainLost, ReplicationChains


class RetryQueue(Mail):
    """Message bus of a worker that resends requests if a server dies. Their vectors must not change until answered.

    Weights arrive in dtype `storage`, and in checkpoints in dtype `wide`. `poll` raises `ReplicationChainLost`, once,
    after the LOST message, if the last server of some parameters is dead.
    """

    def __init__(self, bus: Mail, servers: Sequence[int], replicas: int, storage: np.dtype[Any], wide: np.dtype[Any]):
        self._bus, self._servers, self._storage, self._wide = bus, list(servers), storage, wide
        self._chains = ReplicationChains(servers, replicas)
        self._unanswered: dict[Any, tuple[ServerMessage, tuple[Any, ...]]] = {}
        self._answering: dict[int, int] = {}  # source by ticket of answers that are arriving
        self._ticket = 0
        self._problem: ReplicationChainLost | None = None
        self._is_chain_lost = False
        bus.accept = self._receive_buffers

    def send(self, peer: int, message: ServerMessage, *vectors: Any) -> MessageHandle:
        if message.kind is MessageKind.PROBLEM:
            return self._bus.send(peer, message)
        shard = self._servers.index(peer)
        self._ticket += 1
        message = message._replace(ticket=self._ticket, shard=shard)
        # A tick has no answer, and the last one replaces those before.
        entry: Any = (MessageKind.TICK, shard) if message.kind is MessageKind.TICK else self._ticket
        self._unanswered.pop(entry, None)
        self._unanswered[entry] = message, vectors
        chain = self._chains[shard]
        return self._bus.send(chain[0], message, *vectors) if chain else MessageHandle()

    def poll(self) -> Envelope | None:
        """Next received message, or None. Answers to requests that are no longer open are dropped."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        while (envelope := self._bus.poll()) is not None:
            source, kind, ticket = envelope.source, envelope.message.kind, envelope.message.ticket
            if kind is MessageKind.LOST:
                self._handle_death(source)
            if kind in (MessageKind.LOST, MessageKind.PROBLEM, MessageKind.AGAIN):
                return envelope
            if ticket in self._unanswered and self._answering.pop(ticket, source) == source:
                del self._unanswered[ticket]
                return envelope
        return None

    def idle(self, awaits: Awaits) -> None:
        chains = self._chains
        self._bus.idle(
            lambda: {rank: what for server, what in awaits().items() for rank in chains[self._servers.index(server)]}
        )

    def leave(self) -> None:
        for server in self._servers:
            self._bus.send(server, ServerMessage(MessageKind.BYE))

    def abandon(self, *kinds: MessageKind) -> None:
        self._unanswered = {entry: sent for entry, sent in self._unanswered.items() if sent[0].kind not in kinds}

    def _receive_buffers(self, source: int, message: ServerMessage) -> Sequence[Any]:
        """Buffers for a message: the worker's for the first answer to an open request, otherwise temporary ones."""
        if message.ticket in self._unanswered and message.ticket not in self._answering:
            self._answering[message.ticket] = source
            return self.accept(source, message)
        return [np.empty(message.elements, self._wide if message.number >= 0 else self._storage)]

    def _handle_death(self, rank: int) -> None:
        self._answering = {ticket: source for ticket, source in self._answering.items() if source != rank}
        try:
            concerned = self._chains.lose(rank)
        except ReplicationChainLost as error:
            if not self._is_chain_lost:
                self._problem, self._is_chain_lost = error, True
            return
        for shard in concerned:
            for message, vectors in list(self._unanswered.values()):
                if message.shard == shard:
                    self._bus.send(self._chains[shard][0], message, *vectors)
