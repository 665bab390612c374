"""A worker's letters to servers that may die: kept until they are answered, and sent again to whoever takes over.

It stands between a worker and the post, and knows no MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parallel.server.chain import Chains
from parallel.server.messages import Kind, Letter, Message
from parallel.server.server import Mail


class Retry:
    """A worker's mail. What it sends must not change until it is answered.

    Parameters
    ----------
    post : Mail
    servers : sequence of int
        Their ranks.
    replicas : int
        Servers of a chain.
    dtype : numpy.dtype
        Of weights.

    Attributes
    ----------
    accept : callable
        As of `parallel.server.post.Post`; the worker's.
    asked_again : int
        Letters that were sent more than once.

    Raises
    ------
    ChainLost
        From `poll`, if the last server that had some parameters is dead.
    """

    def __init__(self, post: Mail, servers: Sequence[int], replicas: int, dtype: np.dtype[Any]):
        self._post, self._servers, self._dtype = post, list(servers), dtype
        self._chains = Chains(servers, replicas)
        self._open: dict[Any, tuple[Message, tuple[Any, ...]]] = {}
        self._landing: dict[int, int] = {}
        self._ticket = self.asked_again = 0
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
        return self._post.send(self._chains[shard][0], message, *vectors)

    def poll(self) -> Letter | None:
        """An answer that is still waited for, the word that all is over, or that a server is dead."""
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
        return [np.empty(message.elements, self._dtype)]

    def _lost(self, rank: int) -> None:
        self._landing = {ticket: source for ticket, source in self._landing.items() if source != rank}
        for shard in self._chains.lose(rank):
            for message, vectors in list(self._open.values()):
                if message.shard == shard:
                    self.asked_again += 1
                    self._post.send(self._chains[shard][0], message, *vectors)
