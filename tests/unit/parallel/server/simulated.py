"""Ranks that die at any message: a network in which a test decides what happens next."""

from collections import deque
from functools import partial

from parallel.server.chain import ChainLost, Client, Member


class History:
    """The simplest state that tells updates and their order: the list of them."""

    def __init__(self):
        self.updates, self.gone = [], []

    def apply(self, worker, body):
        assert worker not in self.gone, f"an update of {worker}, which is gone"
        self.updates.append((worker, body))

    def leave(self, worker):
        self.gone.append(worker)

    def answer(self, worker, question):
        """All updates, when so many are this worker's."""
        mine = sum(who == worker for who, _ in self.updates)
        return tuple(self.updates) if mine >= question else None

    def dump(self):
        return tuple(self.updates), tuple(self.gone)

    def load(self, state):
        self.updates, self.gone = map(list, state)


class World:
    """Servers 0 .. S-1, one chain on k of them, workers after them. Every worker makes `updates`, and reads after each.

    What can happen next: a message arrives (`("message", source, target)`), or a rank learns that another is dead
    (`("notice", dead, who)`), whereupon it gets nothing from it any more.
    """

    def __init__(self, servers, replicas, workers, updates):
        self.workers = range(servers, servers + workers)
        self.updates, self.dead, self.broken = updates, set(), set()
        self.lines: dict[tuple[int, int], deque] = {}
        self.notices: set[tuple[int, int]] = set()
        ring = range(servers)
        self.members = {
            me: Member(me, ring, replicas, self.workers, History(), partial(self.send, me)) for me in ring
        }
        self.clients = {me: Client(ring, replicas, partial(self.send, me)) for me in self.workers}
        self.acknowledged = {me: 0 for me in self.workers}
        for client in self.clients.values():
            for number in range(1, updates + 1):
                client.update(number)
                client.read(number)

    def living(self):
        return [me for me in (*self.members, *self.clients) if me not in self.dead]

    def send(self, source, target, message):
        assert source not in self.dead
        if target not in self.dead:
            self.lines.setdefault((source, target), deque()).append(message)

    def choices(self):
        """In a fixed order."""
        messages = [("message", *pair) for pair in sorted(self.lines)]
        return messages + [("notice", *pair) for pair in sorted(self.notices)]

    def kill(self, rank):
        """Messages of the dead are under way still; what was for it is gone."""
        self.dead.add(rank)
        self.lines = {pair: line for pair, line in self.lines.items() if pair[1] != rank}
        self.notices = {pair for pair in self.notices if pair[1] != rank}
        self.notices |= {(rank, who) for who in self.living()}

    def happen(self, kind, source, target):
        node = self.members.get(target) or self.clients[target]
        try:
            if kind == "message":
                line = self.lines[source, target]
                message = line.popleft()
                if not line:
                    del self.lines[source, target]
                node.receive(source, message)
            else:
                self.notices.remove((source, target))
                self.lines.pop((source, target), None)
                node.lost(source)
        except ChainLost:
            self.broken.add(target)
        self.check(target)

    def check(self, rank):
        """What must hold whenever anything has happened to a rank."""
        histories = [m._machine.updates for me, m in self.members.items() if m.holds and me not in self.dead]
        histories.sort(key=len)
        for short, long in zip(histories, histories[1:]):
            assert long[: len(short)] == short, f"two orders: {short} and {long}"
        for history in histories:
            for worker in self.workers:
                mine = [body for who, body in history if who == worker]
                assert mine == list(range(1, len(mine) + 1)), f"worker {worker}'s updates came as {mine}"
        if histories and rank in self.clients and rank not in self.broken:
            client = self.clients[rank]
            safe = min(client.unsafe, default=self.updates + 1) - 1
            count = sum(who == rank for who, _ in histories[0])
            assert count >= safe, f"worker {rank} was told that {safe} are safe, and {count} are there"
            for value in client.answers.values():
                assert list(value) == histories[-1][: len(value)], f"{value} was read and is gone"

    def settled(self):
        """What must hold at the end, when nothing can happen any more."""
        living = [me for me in self.members if me not in self.dead]
        workers = [me for me in self.workers if me not in self.dead]
        if self.broken:
            return
        for me in workers:
            client = self.clients[me]
            assert not client.unsafe and not client.unanswered, f"worker {me} waits for ever"
        chain = [self.members[me] for me in living if self.members[me].holds and me in self.members[me]._ring.chain]
        dumps = [member._machine.dump() for member in chain]
        assert all(dump == dumps[0] for dump in dumps)
        for updates, gone in dumps:
            assert sorted(gone) == sorted(set(self.workers) & self.dead)
            for me in self.workers:
                count = sum(who == me for who, _ in updates)
                assert count == self.updates if me in workers else count <= self.updates
