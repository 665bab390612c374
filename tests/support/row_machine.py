"""Rows of all ranks run on symbols, in an order that a seed chooses among all that the rows allow.

A value is a tuple of terms in the order in which they are combined. A message by address is read when it is received,
as late as the schedule lets it: what the sender overwrites before is wrong.
"""

import random
from collections import deque

from collectives.engine.instructions import ABSOLUTE, ADDRESSES, COPY, SLOTS, Kind

ITEM = 8
"""Bytes of an element."""

STALLED = 20_000
"""Rows in a row that cannot run, after which the ranks wait for each other."""


class _Message:
    def __init__(self, row, values, addresses):
        self.label, self.address_label, self.nbytes = row["label"], row["address_label"], row["nbytes"]
        self.values, self.addresses = values, addresses


class _Mailbox:
    """Messages from one rank to another."""

    def __init__(self):
        self.waiting, self.sent, self.read = deque(), 0, 0


class RowMachine:
    """The programs of all ranks, over the edges of a `PlainHub`; `values` are those of elements, by address."""

    def __init__(self, programs, hub, values, seed):
        self._chance, self._values = random.Random(seed), values
        self._boxes = {(source, peer): _Mailbox() for source in range(hub.size) for peer in range(hub.size)}
        peers = {id(edge.link): peer for edges in hub.edges for peer, edge in edges.items()}
        self._cell = hub.nodes[0].cells[0]
        self.ranks = [_Rank(self, rank, program.rows, peers) for rank, program in enumerate(programs)]

    def run(self):
        """Run all programs; AssertionError if they never end."""
        active = [rank for rank in self.ranks if rank.begin(0)]
        stalled = 0
        while active:
            rank = self._chance.choice(active)
            stalled = 0 if rank.step(self._chance) else stalled + 1
            assert stalled < STALLED, "the ranks wait for each other"
            if rank.round is None:
                active.remove(rank)
        assert all(not box.waiting for box in self._boxes.values()), "messages are left"

    def by_address(self, row):
        """Whether a send goes by its address: it must if it is long, and may if the row says so."""
        return row["nbytes"] > self._cell or (row["address_label"] and self._chance.random() < 0.5)

    def box(self, source, target):
        return self._boxes[source, target]

    def value(self, address):
        return self._values[address]

    def store(self, address, value):
        self._values[address] = value


class _Rank:
    def __init__(self, machine, rank, rows, peers):
        self.machine, self.rank = machine, rank
        self._rows = [dict(zip(rows.rows.dtype.names, row)) for row in rows.rows.tolist()]
        self._operands = [dict(zip(rows.operands.dtype.names, one)) for one in rows.operands.tolist()]
        self._streams, self._rounds = rows.streams.tolist(), rows.rounds.tolist()
        self._bases, self._peers = rows.bases.tolist(), [peers[id(link)] for link in rows.links]
        self._done = [0] * len(self._streams)
        self._numbers, self.round = {}, None

    def begin(self, number):
        """Begin a round, or the next one that is not empty; False at the end."""
        while number < len(self._rounds) - 1:
            streams = range(self._rounds[number], self._rounds[number + 1])
            self._active = [one for one in streams if self._streams[one][0] < self._streams[one][1]]
            if self._active:
                self.round, self._late = number, self.machine._chance.choice(self._active)
                return True
            number += 1
        self.round = None
        return False

    def step(self, chance):
        """Run a row of some stream; False if that has to wait. One stream of each round rarely runs."""
        stream = chance.choice(self._active)
        if stream == self._late and len(self._active) > 1 and chance.random() < 0.9:
            return False
        first, stop, _ = self._streams[stream]
        row = self._rows[first + self._done[stream]]
        if not self._attempt(first + self._done[stream], row):
            return False
        self._done[stream] += 1
        if first + self._done[stream] == stop:
            self._active.remove(stream)
            if not self._active:
                self.begin(self.round + 1)
        return True

    def _attempt(self, number, row):
        operands = self._operands[row["first_operand"] :][: row["operands"]]
        kind = Kind(row["kind"])
        if kind == Kind.LOCAL:
            for operand in operands:
                left, right, out = (self._places(operand, side) for side in ("left", "right", "out"))
                values = [self.machine.value(at) for at in left]
                if row["reduction"] != COPY:
                    values = [value + self.machine.value(at) for value, at in zip(values, right, strict=True)]
                self._store(out, values)
            return True
        if kind == Kind.SEND:
            return self._send(number, row, operands)
        if kind == Kind.RECV:
            return self._receive(row, operands)
        if kind == Kind.WAIT_STREAM:
            return self._done[row["after"]] >= row["count"]
        assert kind == Kind.WAIT_READ, kind
        box = self.machine.box(self.rank, self._peers[self._rows[row["after"]]["link"]])
        return box.read >= self._numbers.get(row["after"], 0)

    def _send(self, number, row, operands):
        box = self.machine.box(self.rank, self._peers[row["link"]])
        if box.sent - box.read == SLOTS:
            return False
        assert row["nbytes"] == sum(operand["nbytes"] for operand in operands)
        places = [at for operand in operands for at in self._places(operand, "left")]
        box.sent += 1
        if self.machine.by_address(row):
            assert row["address_label"] and 0 < len(operands) <= ADDRESSES
            self._numbers[number] = box.sent
            box.waiting.append(_Message(row, None, places))
        else:
            self._numbers[number] = 0
            box.waiting.append(_Message(row, [self.machine.value(at) for at in places], None))
        return True

    def _receive(self, row, operands):
        box = self.machine.box(self._peers[row["link"]], self.rank)
        if not box.waiting:
            return False
        message = box.waiting.popleft()
        assert message.nbytes == row["nbytes"] and message.label == row["label"], "a message of another call"
        by_address = message.values is None
        assert not by_address or message.address_label == row["address_label"]
        values = [self.machine.value(at) for at in message.addresses] if by_address else message.values
        out = [at for operand in operands for at in self._places(operand, "out")]
        if row["reduction"] != COPY:
            own = [self.machine.value(at) for operand in operands for at in self._places(operand, "left")]
            pairs = zip(own, values, strict=True) if row["mine_first"] else zip(values, own, strict=True)
            values = [left + right for left, right in pairs]
        self._store(out, values)
        box.read += 1
        return True

    def _places(self, operand, side):
        memory, offset = operand[side], operand[f"{side}_offset"]
        start = offset if memory == ABSOLUTE else self._bases[memory] + offset
        return range(start, start + operand["nbytes"], ITEM)

    def _store(self, places, values):
        for at, value in zip(places, values, strict=True):
            self.machine.store(at, value)
