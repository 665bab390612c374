"""The compiled engine and the interpreter run the same rows: they leave the same bytes, flags and results."""

import random
from collections import Counter

import numpy as np
import pytest
from support.plain_node import CELL, SHORT, PlainHub
from support.schedule_cases import ENTRIES, Case, advance, places
from support.tiers import default

from collectives.algorithms import catalog
from collectives.engine import extension, interpreter
from collectives.engine.assembly import Instruction, MemoryOperand, Place, Point, assemble, new_bases, waiting
from collectives.engine.extension import available, reduction_number
from collectives.engine.instructions import (
    ABSOLUTE,
    ADDRESSES,
    COPY,
    DONE,
    INLINE,
    KIND,
    MISMATCH,
    RECEIVED,
    SLOTS,
    SOURCE,
    SPREAD,
    WAITING,
    WORDS,
    Kind,
)
from collectives.runtime.execution.program import Program
from collectives.transport.node import shm
from collectives.transport.node.mailbox import address_label, label
from collectives.transport.wire import Combining, Piece

pytestmark = pytest.mark.skipif(not available(), reason="this installation has no compiled engine")

ENGINES = {
    "compiled": lambda rank: extension.engine.RowProgram,
    "interpreted": lambda rank: interpreter.RowProgram,
    "mixed": lambda rank: (extension.engine.RowProgram, interpreter.RowProgram)[rank % 2],
    "mixed the other way": lambda rank: (interpreter.RowProgram, extension.engine.RowProgram)[rank % 2],
}
"""Engine of each rank; the first one is what the others are compared with."""

SIZES = range(1, 34)

HUBS = {
    "whole": {},
    "cut": {"part": 64, "streamed": 1 << 20},
    "long cells": {"cell": 1 << 15, "short": 1 << 10, "part": 1 << 15},
}


def use(programs, engine):
    """Let the programs run in an engine, from their first round."""
    for rank, program in enumerate(programs):
        vars(program)["engine"] = ENGINES[engine](rank)(*program.rows)


# ------------------------------------------------------------------------------------------ every algorithm


def left_by(case, engine):
    """All bytes and counts after two runs."""
    case.hub.reset()
    use(case.programs, engine)
    memories = {id(memory.array): memory.array for program in case.programs for memory in program.memories}
    for array in memories.values():
        array[:] = 0
    for turn in range(2):
        case.fill(turn)
        advance(case.programs)
        case.check(turn)
    return [array.tobytes() for array in memories.values()], case.hub.state()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("size", default(SIZES, 1, 2, 3, 5, 9))
@pytest.mark.parametrize("kind", HUBS)
@pytest.mark.parametrize(("collective", "name"), ENTRIES)
def test_every_algorithm(collective, name, kind, size):
    count = catalog.blocks(collective, name, size)
    lengths = [(1, 5), (2, 40 * count + 1 if size <= 5 else 300)]
    if kind == "long cells" and size <= 5:
        lengths.append((1, 1100))
    roots = places(collective, size)
    for number in range(max(len(roots), len(lengths))):
        (segments, n), root = lengths[number % len(lengths)], roots[number % len(roots)]
        hub = PlainHub(size, **HUBS[kind])
        case = Case(collective, name, size, n, root, segments, in_place=number % 2 == 1, hub=hub)
        model, *others = (left_by(case, engine) for engine in ENGINES)
        assert all(other == model for other in others)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("collective", "name"), ENTRIES)
def test_messages_in_mapped_memory(monkeypatch, collective, name):
    """They go by address, without a copy out of another process."""
    monkeypatch.setattr(shm, "RENDEZVOUS_BYTES", 1)
    hub = PlainHub(4)
    case = Case(collective, name, 4, 600, 3, hub=hub)
    for rank in range(4):
        hub.map(rank, case.sources[rank])
        hub.map(rank, case.targets[rank])
    model, *others = (left_by(case, engine) for engine in ENGINES)
    assert all(other == model for other in others)


# ------------------------------------------------------------------------------------------ random programs

ROOM, CELLS = SPREAD // 8 + 100, 48
"""Elements of a place of memory, and places of a rank."""


class RandomPrograms:
    """Programs of ranks, built row by row in an order in which they could run, and the memory that they leave."""

    def __init__(self, seed, size, **hub):
        self.chance, self.size, self.hub = random.Random(seed), size, PlainHub(size, **hub)
        self.wires = [self.hub.wire(rank) for rank in range(size)]
        self.memory = np.zeros((size, CELLS, ROOM), np.int64)
        self.model = np.zeros_like(self.memory)
        self.fill(self.memory), self.fill(self.model)
        self.programs = [[] for _ in range(size)]
        self.operations = [(ufunc, reduction_number(ufunc, ufunc, np.dtype("i8"))) for ufunc in (np.add, np.maximum)]

    def fill(self, memory):
        memory[:] = np.random.default_rng(0).integers(-(10**6), 10**6, memory.shape)

    def round(self, rows):
        chance = self.chance
        self.streams = [[[] for _ in range(4)] for _ in range(self.size)]
        self.written = [{} for _ in range(self.size)]  # place -> the point at which it was written
        self.read = [set() for _ in range(self.size)]
        self.reads, self.lanes, self.under_way = [], {}, Counter()
        for _ in range(rows):
            chance.choice([self.local, self.message, self.message])()
        for rank, send in self.reads:
            chance.choice(self.streams[rank]).append(send)
        for rank in range(self.size):
            self.programs[rank].append([stream for stream in self.streams[rank] if stream])

    def stream(self, rank):
        return self.chance.choice(self.streams[rank])

    def source(self, rank, stream):
        """A place that the stream may read, after a wait for the stream that has written it."""
        place = self.chance.randrange(CELLS)
        self.read[rank].add(place)
        if place in self.written[rank]:
            stream.append(waiting(self.written[rank][place]))
        return place

    def target(self, rank):
        """A place that nothing in this round reads or writes; None if there is none."""
        free = set(range(CELLS)) - self.read[rank] - self.written[rank].keys()
        return self.chance.choice(sorted(free)) if free else None

    def place(self, rank, cell, start=0):
        address = self.memory[rank, cell].ctypes.data
        return Place(SOURCE, address - self.memory[rank].ctypes.data + 8 * start)

    def local(self):
        rank, count = self.chance.randrange(self.size), self.chance.choice([0, 1, 7, 100, ROOM])
        stream, out = self.stream(rank), self.target(rank)
        if out is None:
            return
        left, right = self.source(rank, stream), self.source(rank, stream)
        if out in self.read[rank]:
            return
        places = (self.place(rank, cell) for cell in (left, right, out))
        ufunc, number = self.chance.choice([(None, COPY), *self.operations])
        stream.append(Instruction(Kind.LOCAL, [MemoryOperand(8 * count, *places)], reduction=number))
        model = self.model[rank]
        model[out, :count] = model[left, :count] if ufunc is None else ufunc(model[left], model[right])[:count]
        self.written[rank][out] = Point(stream, len(stream))

    def cut(self, cell, rank, count, most):
        """Pieces of a place, in any number; the last one has the rest."""
        cuts = sorted(self.chance.randrange(count + 1) for _ in range(self.chance.randrange(most)))
        return [
            Piece(8 * (stop - start), self.place(rank, cell, start)) for start, stop in zip([0, *cuts], [*cuts, count])
        ]

    def message(self):
        """A message, its receive after its send: copied or reduced, in pieces at both ends."""
        chance = self.chance
        source, target = chance.randrange(self.size), chance.randrange(self.size)
        count = chance.choice([0, 1, 7, 8, SHORT // 8, SHORT // 8 + 1, CELL // 8, CELL // 8 + 1, SPREAD // 8, ROOM])
        if self.under_way[source, target] == SLOTS - 1:
            return
        sends = self.lanes.setdefault((source, "to", target), self.stream(source))
        receives = self.lanes.setdefault((target, "from", source), self.stream(target))
        out = self.target(target)
        if out is None:
            return
        cell = self.source(source, sends)
        own = self.source(target, receives)
        if (source == target and cell == out) or own == out:
            return
        message = self.wires[source].send(target, self.cut(cell, source, count, ADDRESSES + 1))
        sends += message.starts
        if message.read is not None:
            self.reads.append((source, message.read))
        into = self.cut(out, target, count, 4)
        ufunc, number = chance.choice([(None, COPY), *self.operations])
        if ufunc is None:
            receives += self.wires[target].receive(source, into).starts
        else:
            base = self.place(target, out).offset
            mine = [Piece(one.nbytes, self.place(target, own, (one.place.offset - base) // 8)) for one in into]
            first = chance.random() < 0.5
            receives += self.wires[target].combine(source, list(zip(mine, into)), Combining(number, first)).starts
        model, arrived = self.model[target], self.model[source, cell]
        model[out, :count] = arrived[:count] if ufunc is None else ufunc(arrived, model[own])[:count]
        self.under_way[source, target] += 1
        self.written[target][out] = Point(receives, len(receives))

    def run(self, engine):
        """Memory and mailboxes that the programs leave."""
        self.hub.reset()
        self.fill(self.memory)
        bases = [new_bases() for _ in range(self.size)]
        for rank in range(self.size):
            bases[rank][SOURCE] = self.memory[rank].ctypes.data
        rows = [assemble(rounds, base) for rounds, base in zip(self.programs, bases)]
        engines = [ENGINES[engine](rank)(*one) for rank, one in enumerate(rows)]
        for one in engines:
            one.begin()
        for _ in range(1000):
            if all([one.advance(0) == DONE for one in engines]):
                return self.memory.copy(), self.hub.state()
        raise AssertionError("no end")


@pytest.mark.parametrize("seed", default(range(200), *range(20)))
def test_random_programs(monkeypatch, seed):
    monkeypatch.setattr(shm, "RENDEZVOUS_BYTES", 8 * (seed % 3) * 8 + 1)
    programs = RandomPrograms(seed, 1 + seed % 3, **HUBS["long cells" if seed % 5 < 2 else "whole"])
    if seed % 2:
        programs.hub.map(0, programs.memory[0])
    for _ in range(4):
        programs.round(30)
    memory, state = programs.run("compiled")
    assert (memory == programs.model).all()
    for engine in ENGINES:
        other, mailboxes = programs.run(engine)
        assert (other == memory).all() and mailboxes == state, engine


# ------------------------------------------------------------------------------------------ messages that fail


def piece(array):
    return Piece(array.nbytes, Place(ABSOLUTE, array.ctypes.data))


def sent_by(engine, hub, array, mark=None, number=1):
    """Send a message from rank 0 to rank 1."""
    program = Program([[hub.wire(0, mark).send(1, [piece(array)]).starts]], hub.wire(0))
    use([program], engine)
    program.engine.begin()
    assert program.engine.advance(0) == DONE


LENGTHS = (0, 8, INLINE, SHORT, CELL, CELL + 8)
PLAIN = "compiled", "interpreted"


@pytest.mark.parametrize("found", LENGTHS)
@pytest.mark.parametrize("expected", LENGTHS)
@pytest.mark.parametrize("mark", [0, 1])
@pytest.mark.parametrize("receiver", PLAIN)
@pytest.mark.parametrize("sender", PLAIN)
def test_messages_of_other_calls_and_lengths(sender, receiver, mark, expected, found):
    """They are refused, and nothing is read or acknowledged; a message of this call is received."""
    hub, sent, into = PlainHub(2), np.ones(found, np.uint8), np.zeros(expected, np.uint8)
    sent_by(sender, hub, sent, hub.mark + mark)
    after = np.zeros(1, np.int64)
    late = Instruction(
        Kind.LOCAL, [MemoryOperand(8, Place(ABSOLUTE, sent_by_address(np.ones(1))), out=piece(after).place)]
    )
    wire = hub.wire(1)
    program = Program([[wire.receive(0, [piece(into)]).starts, [late]]], wire)
    use([program], receiver)
    program.engine.begin()
    fits = expected == found and not mark
    assert program.engine.advance(5) == (DONE if fits else MISMATCH)
    assert bool(into.all()) == (fits or not expected) and program.engine.is_running != fits
    assert bool(after[0]) == fits, "a stream after the failed one has run"
    edge = hub.edges[1][0]
    assert edge.counts[RECEIVED] == fits and edge.mine[edge.my_ack] == fits
    if not fits:
        assert program.engine.failed == 0


KEPT = []


def sent_by_address(array):
    """Address of an array that is kept."""
    KEPT.append(array)
    return array.ctypes.data


@pytest.mark.parametrize("engine", PLAIN)
def test_messages_before_they_are_expected(engine):
    """A round that expects none fails at the first message, and starts nothing else."""
    for arrived in (False, True):
        hub, array = PlainHub(2), np.ones(3)
        hub.wire(1)
        if arrived:
            wire = hub.wire(1)
            first = Program([[wire.send(0, [piece(array)]).starts]], wire)
            use([first], engine)
            first.run()
        wire = hub.wire(0)
        program = Program([[*wire.guard_root(), wire.send(1, [piece(array)]).starts]], wire)
        use([program], engine)
        program.engine.begin()
        assert program.engine.advance(0) == (MISMATCH if arrived else DONE)
        assert hub.edges[0][1].counts[0] == (not arrived), "the message has left"


@pytest.mark.parametrize("engine", PLAIN)
def test_addresses_of_other_lengths_and_numbers(engine):
    """Flags and words as no sender of this call writes them."""
    mark, nbytes = 5, CELL + 8
    data = np.arange(nbytes, dtype=np.uint8)
    address = data.ctypes.data
    cases = {
        (address_label(mark, 1), address, nbytes): DONE,
        (address_label(mark, 2), address, 100, address + 100, nbytes - 100): DONE,
        (address_label(mark, 3), address, 100, address + 100, 0, address + 100, nbytes - 100): DONE,
        (address_label(mark, 1), address, nbytes - 8): MISMATCH,
        (address_label(mark, 2), address, nbytes, address, 8): MISMATCH,
        (address_label(mark, 0), address, nbytes): MISMATCH,
        (address_label(mark, ADDRESSES + 1), address, nbytes): MISMATCH,
        (label(mark, nbytes), nbytes - 1): MISMATCH,
        (label(mark + 1, nbytes), nbytes): MISMATCH,
        (label(mark, 8), 0): MISMATCH,
    }
    for (flag, *words), expected in cases.items():
        hub, into = PlainHub(2), np.zeros(nbytes, np.uint8)
        wire = hub.wire(1)
        program = Program([[wire.receive(0, [piece(into)]).starts]], wire)
        use([program], engine)
        program.engine.begin()
        assert program.engine.advance(3) == WAITING
        edge, at = hub.edges[1][0], hub.edges[1][0].inbox + WORDS
        for place, word in enumerate(words, at + 1):
            edge.theirs[place] = word
        edge.theirs[at] = KIND + flag
        assert program.engine.advance(3) == expected, (flag, words)
        assert (into == data).all() == (expected == DONE)
