"""A chain: what comes to a server goes from the head to the tail, in one order, and the tail answers. Knows no MPI.

Chain replication (van Renesse and Schneider, OSDI 2004), for a server whose state follows from the letters it gets and
their order:

    worker ---> head --at--> member --at--> tail ---> worker      the head gives every letter its number, `at`
                head <-HELD- member <-HELD- tail                  a member keeps what the tail does not have yet

Every member has a server of its own, and all of them act on the same letters in the same order; only the tail's is
heard. So an answer tells that the whole chain knows what was asked, and what is asked of the tail is what is safe. When
a member dies,

* the first of those behind it is the head. What the dead one had not passed on was not answered, and is asked again;
  what is asked twice a server answers twice and does once, since a push is known by its part;
* the member before it passes on again what the tail does not have; what the next one has it knows by the number;
* the member before a dead tail is the tail. What may have been answered by nobody, since it came when the tail was dead
  and this was not known, it asks the head again in the name of who asked.

A worker's death is a letter like others, which the head puts in, so that all members learn of it at the same place.

All this stands on two things. Letters from one rank to another keep their order. And who is told that a rank is lost
gets nothing from it any more, and was told the truth: ranks die, and do not come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from parallel.parameter_server.messages import Kind, Letter, Message

Send = Callable[..., Any]
"""(rank, message, *vectors): starts to send; what goes to a dead rank is lost."""


class Unheard:
    """What was not sent is done."""

    def done(self) -> bool:
        """At once."""
        return True


class ChainLost(RuntimeError):
    """All members of a chain are dead."""


class Chains:
    """Which servers are the chain of which shard, as far as this rank knows who lives.

    The shard that server i begins with has its chain on servers i, i+1, ..., around the ring.

    Parameters
    ----------
    servers : sequence of int
        Their ranks.
    replicas : int
        Servers of a chain.

    Examples
    --------
    >>> chains = Chains([0, 1, 2], 2)
    >>> chains.lose(0)
    [0, 2]
    >>> chains[0], chains[1], chains[2]
    ((1,), (1, 2), (2,))
    """

    def __init__(self, servers: Sequence[int], replicas: int):
        self._chains = [
            tuple(servers[(first + step) % len(servers)] for step in range(replicas)) for first in range(len(servers))
        ]

    def __getitem__(self, shard: int) -> tuple[int, ...]:
        return self._chains[shard]

    def __len__(self) -> int:
        return len(self._chains)

    def of(self, rank: int) -> list[int]:
        """The shards that a server is a member for, its own first."""
        mine = [shard for shard in range(len(self)) if rank in self[shard]]
        return sorted(mine, key=lambda shard: self[shard].index(rank))

    def lose(self, rank: int) -> list[int]:
        """Take a dead server out of all chains; gives the shards concerned.

        Raises
        ------
        ChainLost
            If one of them has no other.
        """
        concerned = self.of(rank)
        for shard in concerned:
            self._chains[shard] = tuple(member for member in self[shard] if member != rank)
        if empty := [shard for shard in concerned if not self[shard]]:
            raise ChainLost(
                f"server {empty[0]} of {len(self)} is lost: rank {rank} was the last that had its parameters"
            )
        return sorted(concerned)


class Member:
    """A server's place in one chain: orders letters, or takes them as ordered, and passes them on.

    Parameters
    ----------
    me, shard : int
        This rank; which chain.
    chains : Chains
        Whoever makes this one keeps them up to date.
    send : Send

    Attributes
    ----------
    ordered : deque of Letter
        What the member's server is to act on, in the chain's order: the caller takes it out.
    """

    def __init__(self, me: int, shard: int, chains: Chains, send: Send):
        self._me, self._shard, self._chains, self._send = me, shard, chains, send
        self._chain = chains[shard]
        self._count = self._safe = 0
        self._log: deque[Letter] = deque()
        self._asked: deque[Letter] = deque()
        self._dead: set[int] = set()
        self.ordered: deque[Letter] = deque()

    @property
    def is_head(self) -> bool:
        """Whether it gives letters their numbers."""
        return self._chain[0] == self._me

    @property
    def is_tail(self) -> bool:
        """Whether its server is heard."""
        return self._chain[-1] == self._me

    def receive(self, letter: Letter) -> None:
        """Take a letter from a worker, a server of another shard, or a member."""
        message = letter.message
        if message.kind is Kind.HELD:
            self._settle(message.at)
        elif not message.at:
            self._asked.append(letter)
            self._order()
        elif message.at > self._count:
            assert message.at == self._count + 1, f"letter {message.at} of shard {self._shard} came after {self._count}"
            self._keep(letter)
        else:
            self._hold(letter.source)

    def lost_worker(self, rank: int) -> None:
        """A worker is dead: all members shall know, from the head."""
        self._dead.add(rank)
        if self.is_head:
            self._bury([rank])

    def lost_server(self) -> None:
        """A server is dead, and the chains are up to date: be what the place in the chain is now."""
        before, behind = self._neighbours()
        self._chain = self._chains[self._shard]
        new_before, new_behind = self._neighbours()
        if new_behind != behind:
            for letter in self._log:
                if new_behind is not None:
                    self._send(new_behind, letter.message, *letter.vectors)
                elif letter.message.kind is not Kind.GONE:
                    self._send(self._chain[0], letter.message._replace(at=0), *letter.vectors)
            if new_behind is None:
                self._settle(self._count)
        if new_before != before:
            if new_before is None:
                self._order()
                self._bury(sorted(self._dead))
            else:
                self._hold(new_before)

    def _neighbours(self) -> tuple[int | None, int | None]:
        """The members before and behind this one; None where there is nobody."""
        row = (None, *self._chain, None)
        place = row.index(self._me)
        return row[place - 1], row[place + 1]

    def _order(self) -> None:
        """Number what was asked, if this is the head; else it waits: who asks may know of a death before this rank."""
        while self.is_head and self._asked:
            letter = self._asked.popleft()
            sender = letter.source if letter.message.sender < 0 else letter.message.sender
            if sender not in self._dead:
                self._keep(letter._replace(message=letter.message._replace(sender=sender, at=self._count + 1)))

    def _bury(self, workers: Sequence[int]) -> None:
        for worker in workers:
            message = Message(Kind.GONE, shard=self._shard, sender=worker, at=self._count + 1)
            self._keep(Letter(self._me, message))

    def _keep(self, letter: Letter) -> None:
        """Pass a letter on, and let the server have it."""
        message = letter.message
        self._count = message.at
        if message.kind is Kind.GONE:
            self._dead.add(message.sender)
        _, behind = self._neighbours()
        if behind is not None:
            kept = letter._replace(vectors=tuple(vector.copy() for vector in letter.vectors))
            self._log.append(kept)
            self._send(behind, message, *kept.vectors)
        self.ordered.append(letter._replace(source=message.sender))
        if behind is None:
            self._settle(self._count)

    def _settle(self, count: int) -> None:
        """The tail has all up to this number."""
        while self._log and self._log[0].message.at <= count:
            self._log.popleft()
        if count > self._safe:
            self._safe = count
            before, _ = self._neighbours()
            if before is not None:
                self._hold(before)

    def _hold(self, rank: int) -> None:
        self._send(rank, Message(Kind.HELD, shard=self._shard, at=self._safe))
