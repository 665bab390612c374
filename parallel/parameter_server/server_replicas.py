"""A server's letters, where it is a member of several chains: its own shard's, and those that it is a replica of.

It stands between servers and the post, and knows no MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from parallel.parameter_server.replication_chain import ChainLost, Chains, Member, Unheard
from parallel.parameter_server.messages import Kind, Letter, Message
from parallel.parameter_server.server_loop import Mail, Server


class Replicas:
    """All that a server rank does for the chains that it is in.

    Parameters
    ----------
    post : Mail
    me : int
        This rank.
    servers, workers : sequence of int
        Their ranks.
    replicas : int
        Servers of a chain.

    Attributes
    ----------
    mails : dict of int to ShardMail
        By shard: what its server takes for a post. This rank's own comes first.
    servers : dict of int to Server
        By shard; the caller puts them in.

    Raises
    ------
    ChainLost
        From a mail's `poll`, if the last server that had some parameters is dead.
    """

    def __init__(self, post: Mail, me: int, servers: Sequence[int], workers: Sequence[int], replicas: int):
        self._post, self.me, self._ranks, self._workers = post, me, list(servers), set(workers)
        self.chains = Chains(servers, replicas)
        self.mails = {shard: ShardMail(self, shard) for shard in self.chains.of(me)}
        self.servers: dict[int, Server] = {}
        self._here: list[Letter] = []
        self._left: set[int] = set()
        post.accept = self._room

    def send(self, rank: int, message: Message, *vectors: Any) -> Any:
        """Send to a rank, which may be this one."""
        if rank != self.me:
            return self._post.send(rank, message, *vectors)
        self._here.append(Letter(rank, message, tuple(vector.copy() for vector in vectors)))
        return Unheard()

    def move(self) -> bool:
        """Take the next letter to where it belongs; whether there was one."""
        letter = self._here.pop(0) if self._here else self._post.poll()
        if letter is None:
            return False
        kind = letter.message.kind
        if kind is Kind.LOST:
            self._lost(letter.source)
        elif kind is Kind.BYE:
            self._left.add(letter.source)
        elif kind is Kind.PROBLEM:
            self.own.member.ordered.append(letter)
        else:
            self.mails[letter.message.shard].member.receive(letter)
        for shard, mail in self.mails.items():
            if mail.member.ordered and mail is not self.own:
                self.servers[shard].catch_up()
        return True

    def until(self, enough: Callable[[], bool]) -> None:
        """Serve all shards until something is so, or no worker needs this rank any more."""
        self._serve(lambda: enough() or self._left >= self._workers)

    def until_left(self) -> None:
        """Serve all shards until nobody needs this rank any more; what is lost then is no loss."""
        others = set(self._ranks) - {self.me}
        self._see_off(self._workers)
        for rank in others:
            self._post.send(rank, Message(Kind.BYE))
        self._see_off(others)

    def _see_off(self, ranks: set[int]) -> None:
        while not self._left >= ranks:
            with suppress(ChainLost):
                self._serve(lambda: self._left >= ranks)

    def _serve(self, enough: Callable[[], bool]) -> None:
        while not enough():
            self.servers[self.own.shard].catch_up()
            self.idle()

    @property
    def own(self) -> ShardMail:
        """Of the shard that this rank began with."""
        return next(iter(self.mails.values()))

    def idle(self) -> None:
        """As the post."""
        self._post.idle()

    def _lost(self, rank: int) -> None:
        self.own.member.ordered.append(Letter(rank, Message(Kind.LOST)))
        self._left.add(rank)
        if rank in self._workers:
            for mail in self.mails.values():
                mail.member.lost_worker(rank)
            return
        for shard in self.chains.lose(rank):
            if shard in self.mails:
                self.mails[shard].member.lost_server()
        for shard, mail in self.mails.items():
            mail.say_again()
            self.servers[shard].remind()

    def _room(self, source: int, message: Message) -> Sequence[Any]:
        return self.mails[message.shard].accept(source, message)


class ShardMail:
    """A shard's server takes it for a post: letters come in the order of the chain, and only the tail is heard."""

    def __init__(self, replicas: Replicas, shard: int):
        self._replicas, self.shard = replicas, shard
        self.member = Member(replicas.me, shard, replicas.chains, replicas.send)
        self.accept: Callable[[int, Message], Sequence[Any]] = lambda source, message: ()
        self._said: dict[int, tuple[Message, tuple[Any, ...]]] = {}

    def send(self, peer: int, message: Message, *vectors: Any) -> Any:
        """Answer a worker, or write to the server of another shard, whoever that is now."""
        replicas = self._replicas
        if message.kind is Kind.PROBLEM:
            return replicas.send(peer, message)
        if peer in replicas._ranks:
            shard = replicas._ranks.index(peer)
            self._said[shard] = message._replace(shard=shard, sender=replicas._ranks[self.shard]), vectors
            return self._write(shard) if self.member.is_tail else Unheard()
        return replicas.send(peer, message, *vectors) if self.member.is_tail else Unheard()

    def say_again(self) -> None:
        """Write the last letter to each server again: it may have been lost."""
        for shard in self._said if self.member.is_tail else ():
            self._write(shard)

    def poll(self) -> Letter | None:
        """The next letter to act on."""
        while not self.member.ordered:
            if self is not self._replicas.own or not self._replicas.move():
                return None
        return self.member.ordered.popleft()

    def idle(self) -> None:
        """As the post."""
        self._replicas.idle()

    def abandon(self, *kinds: Kind) -> None:
        """A server asks nothing that it would wait for."""

    def _write(self, shard: int) -> Any:
        chain, (message, vectors) = self._replicas.chains[shard], self._said[shard]
        return self._replicas.send(chain[0], message, *vectors) if chain else Unheard()  # lost, and all will end
