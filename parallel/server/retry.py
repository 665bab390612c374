"""A worker's letters to servers that may die: kept until they are answered, and sent again to whoever takes over.

It stands between a worker and the post, and knows no MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parallel.parameter_server.replication_chain import ChainLost, Chains, Unheard
from parallel.parameter_server.messages import Kind, Letter, Message
from parallel.parameter_server.server_loop import Mail


class Retry:
    """A worker's mail. What it sends must not change until it is answered.

    Parameters
    ----------
    post : Mail
    servers : sequence of int
        Their ranks.
    replicas : int
        Servers of a chain.
    storage, wide : numpy.dtype
        Of weights as operators see them, and as checkpoints keep them.

    Attributes
    ----------
    accept : callable
        As of `parallel.parameter_server.message_bus.Post`; the worker's.

    Raises
    ------
    ChainLost
        From `poll`, once, after the letter that says so, if the last server that had some parameters is dead.
    """

    def __init__(
        self, post: Mail, servers: Sequence[int], replicas: int, storage: np.dtype[Any], wide: np.dtype[Any]
    ):
        self._post, self._servers, self._storage, self._wide = post, list(servers), storage, wide
        self._chains = Chains(servers, replicas)
        self._open: dict[Any, tuple[Message, tuple[Any, ...]]] = {}
        self._landing: dict[int, int] = {}
        self._ticket = 0
        self._problem: ChainLost | None = None
        self._is_over = False
        self.accept: Callable[[int, Message], Sequence[Any]] = lambda source, message: ()
        post.accept = self._room

    def send(self, peer: int, message: Message, *vectors: Any) -> Any:
        """Send to a server, or to whoever has its place."""
        if message.kind is Kind.PROBLEM:
            return self._post.send(peer, message)
        shard = self._servers.index(peer)
        self._ticket += 1
        message = message._replace(ticket=self._ticket, shard=shard)
        entry: Any = self._ticket
        if message.kind is Kind.TICK:  # it has no answer, and the last one counts
            entry = Kind.TICK, shard
        self._open.pop(entry, None)
        self._open[entry] = message, vectors
        chain = self._chains[shard]
        return self._post.send(chain[0], message, *vectors) if chain else Unheard()

    def poll(self) -> Letter | None:
        """An answer that is still waited for, the word that all is over, or that a server is dead."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        while (letter := self._post.poll()) is not None:
            message = letter.message
            if message.kind is Kind.LOST:
                self._lost(letter.source)
                return letter
            if message.kind in (Kind.PROBLEM, Kind.AGAIN):
                return letter
            if message.ticket in self._open and self._landing.pop(message.ticket, letter.source) == letter.source:
                del self._open[message.ticket]
                return letter
        return None

    def idle(self) -> None:
        """As the post."""
        self._post.idle()

    def leave(self) -> None:
        """Tell all servers that they are not needed any more."""
        for server in self._servers:
            self._post.send(server, Message(Kind.BYE))

    def abandon(self, *kinds: Kind) -> None:
        """Wait no more for answers to what was asked of these kinds."""
        self._open = {entry: asked for entry, asked in self._open.items() if asked[0].kind not in kinds}

    def _room(self, source: int, message: Message) -> Sequence[Any]:
        """Where vectors shall land: where the worker says, if this is the first answer and waited for."""
        if message.ticket in self._open and message.ticket not in self._landing:
            self._landing[message.ticket] = source
            return self.accept(source, message)
        return [np.empty(message.elements, self._wide if message.number >= 0 else self._storage)]

    def _lost(self, rank: int) -> None:
        self._landing = {ticket: source for ticket, source in self._landing.items() if source != rank}
        try:
            concerned = self._chains.lose(rank)
        except ChainLost as error:
            if not self._is_over:
                self._problem, self._is_over = error, True
            return
        for shard in concerned:
            for message, vectors in list(self._open.values()):
                if message.shard == shard:
                    self._post.send(self._chains[shard][0], message, *vectors)
