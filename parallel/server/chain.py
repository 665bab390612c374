"""A chain of replicas: an update goes from the head to the tail, in one order, and is safe when the tail has it.

Chain replication (van Renesse and Schneider, OSDI 2004), for a state that is a function of its updates and their order:

    worker --Ask--> head --Pass--> member --Pass--> tail          the head gives every update its number
    worker <--Safe-- head <--Held-- member <--Held-- tail         a member keeps what the tail does not have yet
    worker <----------------Answer---------------- tail           whoever reads sees what all of the chain has

Servers stand in a ring; a chain is the first k of them that live, from the shard's own on. So when one dies,

* the first of those behind it is the head, and workers ask it again for what they have not been told is safe: what it
  has already it knows by the worker and the worker's number;
* the member before it passes on again what is not safe yet; what the next one has already it knows by the update's
  number;
* a server that was no member comes in as the tail, and gets the whole state from the one before it.

A worker's death is an update like others, which the head puts in, so that all replicas learn of it at the same place.

Nothing here knows of MPI, bytes or time. What it stands on: messages between two ranks keep their order; who is told
that a rank is lost gets no message from it any more, and was told the truth (ranks die, they do not come back).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Ask(NamedTuple):
    """A worker asks the head for an update, its own number `seq`, from 1 on."""

    seq: int
    body: Any


class Pass(NamedTuple):
    """A member passes update number `at` on to the next. `body` is None if the worker has died: its last update."""

    at: int
    worker: int
    seq: int
    body: Any


class Held(NamedTuple):
    """The tail has so many updates: told from member to member, towards the head."""

    count: int


class Safe(NamedTuple):
    """The whole chain has the worker's update number `seq`, and all before it."""

    seq: int


class State(NamedTuple):
    """All that a new member needs: updates in it, each worker's last number, the dead workers, and the state."""

    count: int
    last: dict[int, int]
    gone: frozenset[int]
    state: Any


class Read(NamedTuple):
    """A worker asks the tail a question; `ticket` is its number, which the answer repeats."""

    ticket: int
    question: Any


class Answer(NamedTuple):
    """The tail's answer."""

    ticket: int
    value: Any


class Broken(NamedTuple):
    """All members with the state are dead."""


Send = Callable[[int, Any], None]
"""(rank, message): sends without waiting. What goes to a dead rank is lost."""


class Replicated(Protocol):
    """A state that is a function of its updates and their order."""

    def apply(self, worker: int, body: Any) -> None:
        """Take an update of a living worker."""

    def leave(self, worker: int) -> None:
        """Learn that a worker is dead."""

    def answer(self, worker: int, question: Any) -> Any:
        """What a worker wants to know, or None to be asked again after the next update."""

    def dump(self) -> Any:
        """All of it, for `load`: nothing that changes later."""

    def load(self, state: Any) -> None:
        """Be as another was when it was dumped."""


class Ring:
    """Servers in order, and the chain that the living among them are.

    >>> ring = Ring([4, 5, 6], 2)
    >>> ring.lose(4)
    True
    >>> ring.chain
    (5, 6)
    """

    def __init__(self, servers: Sequence[int], replicas: int):
        self._living, self._replicas = list(servers), replicas

    @property
    def chain(self) -> tuple[int, ...]:
        """From head to tail."""
        return tuple(self._living[: self._replicas])

    def lose(self, rank: int) -> bool:
        """Take a rank out; whether it was one of the living."""
        lost = rank in self._living
        if lost:
            self._living.remove(rank)
        return lost

    def neighbours(self, rank: int) -> tuple[int | None, int | None]:
        """The members before and behind this one; None where there is nobody."""
        if rank not in self.chain:
            return None, None
        row = (None, *self.chain, None)
        place = row.index(rank)
        return row[place - 1], row[place + 1]


class Member:
    """One server's part in one chain; a server that is no member yet waits for its turn.

    Parameters
    ----------
    me : int
        This rank.
    servers : sequence of int
        All servers, in the ring's order from the head on.
    replicas : int
        How many of them are a chain.
    workers : sequence of int
    machine : Replicated
    send : Send
    """

    def __init__(
        self, me: int, servers: Sequence[int], replicas: int, workers: Sequence[int], machine: Replicated, send: Send
    ):
        self._me, self._send, self._machine, self._workers = me, send, machine, tuple(workers)
        self._ring = Ring(servers, replicas)
        self._with_state = set(self._ring.chain)
        self._count = self._safe = 0
        self._log: deque[Pass] = deque()
        self._last: dict[int, int] = {}
        self._gone: frozenset[int] = frozenset()
        self._dead: set[int] = set()
        self._asks: deque[tuple[int, Ask]] = deque()
        self._reads: list[tuple[int, Read]] = []
        self._early: list[tuple[int, Any]] = []
        self._before, self._behind = self._ring.neighbours(me)
        self._take: dict[type, Callable[[int, Any], None]] = {
            Ask: self._ask,
            Pass: self._pass,
            Held: self._held,
            State: self._state,
            Read: self._read,
        }

    @property
    def holds(self) -> bool:
        """Whether it has the state."""
        return self._me in self._with_state

    @property
    def is_head(self) -> bool:
        """Whether it orders the updates."""
        return self.holds and self._ring.chain[0] == self._me

    @property
    def is_tail(self) -> bool:
        """Whether it answers questions."""
        return self.holds and self._ring.chain[-1] == self._me

    def receive(self, source: int, message: Any) -> None:
        """Take a message of one of the kinds that servers get."""
        if self._me in self._ring.chain:
            self._take[type(message)](source, message)
        else:
            self._early.append((source, message))

    def lost(self, rank: int) -> None:
        """Learn that a server or a worker is dead."""
        if rank in self._workers:
            self._dead.add(rank)
            self._bury()
            return
        before, behind = self._before, self._behind
        if self._ring.lose(rank) and self._me in self._ring.chain:
            self._before, self._behind = self._ring.neighbours(self._me)
            early, self._early = self._early, []
            for source, message in early:
                self._take[type(message)](source, message)
            self._rearrange(self._before != before, self._behind != behind)

    # ------------------------------------------------------------------------------------------ a chain that is whole

    def _ask(self, worker: int, message: Ask) -> None:
        self._asks.append((worker, message))
        self._order()

    def _order(self) -> None:
        """Number what was asked, if this is the head; else it waits: a worker may know of a death before a server."""
        while self.is_head and self._asks:
            worker, (seq, body) = self._asks.popleft()
            last = self._last.get(worker, 0)
            if worker in self._gone:
                continue
            if seq > last:
                assert seq == last + 1, f"worker {worker}: update {seq} came after {last}"
                self._keep(Pass(self._count + 1, worker, seq, body))
            elif all(entry.worker != worker or entry.seq > seq for entry in self._log):
                self._send(worker, Safe(seq))

    def _pass(self, source: int, entry: Pass) -> None:
        if entry.at > self._count:
            assert entry.at == self._count + 1, f"update {entry.at} came after {self._count}"
            self._keep(entry)
        else:
            self._send(source, Held(self._safe))

    def _keep(self, entry: Pass) -> None:
        """Apply an update, and pass it on."""
        self._count = entry.at
        if entry.body is None:
            self._gone |= {entry.worker}
            self._machine.leave(entry.worker)
        else:
            self._last[entry.worker] = entry.seq
            self._machine.apply(entry.worker, entry.body)
        self._log.append(entry)
        if self._behind is None:
            self._settle(self._count)
        else:
            self._send(self._behind, entry)

    def _held(self, source: int, message: Held) -> None:
        self._settle(message.count)

    def _settle(self, count: int) -> None:
        """All up to this number is safe: tell the member before, or the workers."""
        while self._log and self._log[0].at <= count:
            entry = self._log.popleft()
            if self._before is None and entry.body is not None:
                self._send(entry.worker, Safe(entry.seq))
        if count > self._safe:
            self._safe = count
            if self._before is not None:
                self._send(self._before, Held(count))
        self._tell()

    def _read(self, worker: int, message: Read) -> None:
        self._reads.append((worker, message))
        self._tell()

    def _tell(self) -> None:
        """Answer what can be answered, if this is the tail."""
        if not self.is_tail:
            return
        reads, self._reads = self._reads, []
        for worker, read in reads:
            value = self._machine.answer(worker, read.question)
            if value is None:
                self._reads.append((worker, read))
            else:
                self._send(worker, Answer(read.ticket, value))

    # ------------------------------------------------------------------------------------------ a chain that is torn

    def _rearrange(self, other_before: bool, other_behind: bool) -> None:
        """A server has died: be what the place in the chain is now."""
        if not self.holds:
            if self._before is None:
                for worker in self._workers:
                    self._send(worker, Broken())
            return
        if other_before and self._before is not None:
            self._send(self._before, Held(self._safe))
        if other_behind:
            self._join()
        if self._before is None:
            self._bury()
            self._order()

    def _join(self) -> None:
        """Pass all that it may lack on to the next member; without one, this is the tail."""
        if self._behind is None:
            self._settle(self._count)
        elif self._behind in self._with_state:
            for entry in self._log:
                self._send(self._behind, entry)
        else:
            self._with_state.add(self._behind)
            self._send(self._behind, State(self._count, dict(self._last), self._gone, self._machine.dump()))

    def _state(self, source: int, message: State) -> None:
        """Become a member, or as recent as the sender, who does not know that this is one."""
        if self.holds and message.count <= self._count:
            self._send(source, Held(self._safe))
            return
        self._count, last, self._gone, state = message
        self._last = dict(last)
        self._machine.load(state)
        self._log.clear()
        self._with_state = {self._me}
        self._join()

    def _bury(self) -> None:
        """Forget what dead workers asked, and let all replicas know of them, if this is the head."""
        self._reads = [(worker, read) for worker, read in self._reads if worker not in self._dead]
        self._asks = deque((worker, ask) for worker, ask in self._asks if worker not in self._dead)
        if self.is_head:
            for worker in sorted(self._dead - self._gone):
                self._keep(Pass(self._count + 1, worker, 0, None))


class ChainLost(RuntimeError):
    """All servers that had a shard's state are dead."""


class Client:
    """What one worker has asked of one chain, kept until it is safe or answered.

    Parameters
    ----------
    servers, replicas
        As of `Member`.
    send : Send

    Attributes
    ----------
    unsafe : dict
        Updates by their number that are not known to be safe.
    unanswered : dict
        Questions by their ticket.
    answers : dict
        Values by ticket, for the caller to take out.
    """

    def __init__(self, servers: Sequence[int], replicas: int, send: Send):
        self._ring, self._send = Ring(servers, replicas), send
        self._seq = self._ticket = 0
        self.unsafe: dict[int, Any] = {}
        self.unanswered: dict[int, Any] = {}
        self.answers: dict[int, Any] = {}

    def update(self, body: Any) -> int:
        """Ask for an update; its number."""
        self._seq += 1
        self.unsafe[self._seq] = body
        self._send(self._ring.chain[0], Ask(self._seq, body))
        return self._seq

    def read(self, question: Any) -> int:
        """Ask a question; the ticket of its answer."""
        self._ticket += 1
        self.unanswered[self._ticket] = question
        self._send(self._ring.chain[-1], Read(self._ticket, question))
        return self._ticket

    def receive(self, source: int, message: Safe | Answer | Broken) -> None:
        """Take what a server says.

        Raises
        ------
        ChainLost
        """
        match message:
            case Safe(seq):
                for number in [number for number in self.unsafe if number <= seq]:
                    del self.unsafe[number]
            case Answer(ticket, value):
                if ticket in self.unanswered:
                    del self.unanswered[ticket]
                    self.answers[ticket] = value
            case Broken():
                raise ChainLost(f"all servers that had the state are dead; {source} has none")

    def lost(self, rank: int) -> None:
        """Learn that a server is dead, and ask the others again.

        Raises
        ------
        ChainLost
            If there are no others.
        """
        old = self._ring.chain
        if not self._ring.lose(rank):
            return
        new = self._ring.chain
        if not new:
            raise ChainLost("all servers are dead")
        if new[0] != old[0]:
            for seq, body in self.unsafe.items():
                self._send(new[0], Ask(seq, body))
        if new[-1] != old[-1]:
            for ticket, question in self.unanswered.items():
                self._send(new[-1], Read(ticket, question))
