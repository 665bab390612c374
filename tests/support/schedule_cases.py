"""Collectives of the catalogue bound to memory on all ranks of one process, and what must come out."""

from functools import cache, partial
from itertools import accumulate

import numpy as np

from collectives.algorithms import catalog
from collectives.engine.instructions import SOURCE, TARGET
from collectives.runtime.arguments.ops import Combiner
from collectives.runtime.binding.binder import bind
from collectives.runtime.execution.program_memory import ElementArray, Task
from collectives.schedule import semantics
from collectives.schedule.chunks import MemorySpan, even
from collectives.schedule.semantics import MEANINGS
from support import argument_spellings
from support.loopback import LoopbackHub
from support.transport_contract import spmd

ENTRIES = [(collective, name) for collective in catalog.CATALOG for name in catalog.names(collective)]
POISON = -777


def join(left, right, out):
    """Bind the operation of `words`."""
    return lambda: np.copyto(out, argument_spellings.join(left, right))


JOINING = Combiner(join, False)
ADDING = Combiner(partial(partial, np.add), True, np.add, np.add)


@cache
def letters(rank, n, turn):
    """Words of a rank: the same array in all cases, read-only."""
    words = argument_spellings.letters(rank, n, turn)
    words.flags.writeable = False
    return words


def advance(programs, chance=None):
    """Run the programs in this thread, bit by bit, in round robin or by chance."""
    for program in programs:
        program.start()
    under_way = list(programs)
    for _ in range(10_000):
        if chance is not None:
            chance.shuffle(under_way)
        under_way = [program for program in under_way if not program.advance()]
        if not under_way:
            return
    raise AssertionError("no end after 10000 turns")


class Case:
    """One collective on all ranks: its memories, its programs, and what must come out.

    Of a vector of n elements on every rank the chunks that the rank brings hold its letters, everything else poison.
    """

    def __init__(self, collective, name, size, n, root=0, segments=1, in_place=False, cut=0, blocks=None, hub=None):
        self.collective, self.name, self.size, self.root = collective, name, size, root
        parts, count = segments, catalog.blocks(collective, name, size)
        if MEANINGS[collective].vector:
            self.lengths = even(n, count * parts)
        else:
            lengths = even(n, count) if blocks is None else blocks
            self.lengths = tuple(piece for length in lengths for piece in even(length, parts))
        self.n = sum(self.lengths)
        starts = tuple(accumulate(self.lengths[:-1], initial=0))
        self.slices = [slice(start, start + length) for start, length in zip(starts, self.lengths)]
        self.hub = hub or LoopbackHub(size)
        self.ordered = catalog.find(collective, name).ordered
        self.brings = [semantics.before(collective, rank, size, root, parts, count) for rank in range(size)]
        self.takes = [semantics.after(collective, rank, size, root, parts, count) for rank in range(size)]
        self.sources, self.targets, self.programs, self.in_place = [], [], [], in_place
        for rank in range(size):
            target = np.full(self.n, POISON, argument_spellings.DTYPE)
            source = target if in_place else np.full(self.n, POISON, argument_spellings.DTYPE)
            where = TARGET if in_place else SOURCE
            task = Task(
                catalog.build(collective, name, rank, size, root, segments),
                self.lengths,
                {chunk: self.place(where, chunk) for chunk in self.brings[rank]},
                {chunk: self.place(TARGET, chunk) for chunk in self.takes[rank]},
                argument_spellings.DTYPE.itemsize,
                cut,
            )
            self.sources.append(source)
            self.targets.append(target)
            self.programs.append(self.bind(rank, task, source, target))

    def place(self, memory, chunk):
        return MemorySpan(memory, self.slices[chunk].start, self.slices[chunk].stop)

    def bind(self, rank, task, source, target):
        memories = [ElementArray(array, array.ctypes.data) for array in (source, target)]
        combining = JOINING if self.ordered else ADDING
        return bind(task, *memories, self.hub.wire(rank), combining)

    def fill(self, turn=0):
        for rank in range(self.size):
            self.targets[rank][:] = POISON
            self.sources[rank][:] = POISON
            words = letters(rank, self.n, turn)
            for chunk in self.brings[rank]:
                self.sources[rank][self.slices[chunk]] = words[self.slices[chunk]]

    def combined(self, chunk, terms, turn):
        """Values of a chunk that combines these terms."""
        values = [letters(origin, self.n, turn)[self.slices[chunk]] for origin, _ in terms]
        whole = values[0]
        for value in values[1:]:
            whole = argument_spellings.join(whole, value) if self.ordered else whole + value
        return whole

    def check(self, turn=0):
        expected = {}
        for rank in range(self.size):
            for chunk, terms in self.takes[rank].items():
                if (chunk, terms) not in expected:
                    expected[chunk, terms] = self.combined(chunk, terms, turn)
                found, whole = self.targets[rank][self.slices[chunk]], expected[chunk, terms]
                assert (found == whole).all(), f"rank {rank}, chunk {chunk}: {found} instead of {whole}"
            if self.in_place:
                continue
            untaken = set(range(len(self.lengths))) - set(self.takes[rank])
            assert all((self.targets[rank][self.slices[c]] == POISON).all() for c in untaken), (
                f"rank {rank}: memory outside of what it takes was written to"
            )
            words = letters(rank, self.n, turn)
            for chunk in self.brings[rank]:
                place = self.slices[chunk]
                unharmed = (self.sources[rank][place] == words[place]).all()
                assert unharmed, f"rank {rank}: its send buffer was written to"

    def step_by_step(self, chance=None):
        """All ranks in this thread, bit by bit, in round robin or by chance."""
        advance(self.programs, chance)

    def blocking(self):
        spmd(self.size, lambda rank, size, wire: self.programs[rank].run())


def places(collective, size):
    return sorted({0, size // 2, size - 1}) if MEANINGS[collective].rooted else [0]
