"""Rows do what the schedule means, in whatever order ranks and streams advance."""

import pytest
from support import argument_spellings
from support.engines import use_interpreter
from support.plain_node import PlainHub
from support.row_machine import ITEM, RowMachine
from support.schedule_cases import ENTRIES, Case, join, places
from support.tiers import default

from collectives.algorithms import catalog
from collectives.engine.assembly import Instruction
from collectives.engine.instructions import LINE, Kind
from collectives.runtime.arguments.ops import Combiner
from collectives.runtime.binding.binder import bind
from collectives.runtime.execution.program_memory import ElementArray
from collectives.transport.node import shm

LARGEST = 33
SIZES = range(1, LARGEST + 1)

HUBS = {
    "whole": {},
    "cut": {"part": 3 * ITEM, "streamed": 1 << 20},
    "by address": {"part": 1 << 20, "streamed": 0},
}
"""Transports with cells of a few elements, by how they cut messages."""


class Symbols(Case):
    """A case whose operation the engine has, whatever it is."""

    def bind(self, rank, task, source, target):
        combiner = Combiner(join, not self.ordered, argument_spellings.join, argument_spellings.join)
        memories = [ElementArray(array, array.ctypes.data) for array in (source, target)]
        return bind(task, *memories, self.hub.wire(rank), combiner)

    def place_of(self, array, element):
        return array.ctypes.data + element * ITEM

    def inputs(self):
        """Term of each element that a rank has, by address."""
        return {
            self.place_of(self.sources[rank], element): ((rank, element),)
            for rank in range(self.size)
            for chunk in self.brings[rank]
            for element in range(*self.slices[chunk].indices(self.n))
        }

    def check_symbols(self, values):
        for rank in range(self.size):
            for chunk, terms in self.takes[rank].items():
                for element in range(*self.slices[chunk].indices(self.n)):
                    found = values[self.place_of(self.targets[rank], element)]
                    expected = [(origin, element) for origin, _ in terms]
                    assert (list(found) if self.ordered else sorted(found)) == expected, (rank, chunk, element)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("size", default(SIZES, 1, 2, 3, 6))
@pytest.mark.parametrize("kind", HUBS)
@pytest.mark.parametrize(("collective", "name"), ENTRIES)
def test_in_whatever_order_rows_run(monkeypatch, collective, name, kind, size):
    use_interpreter(monkeypatch)
    monkeypatch.setattr(shm, "RENDEZVOUS_BYTES", 1)
    count = catalog.blocks(collective, name, size)
    for number, root in enumerate(places(collective, size)):
        for segments, n in ((1, 3 * count), (2, count + 1)) if size <= 9 else ((1 + number % 2, count + 1),):
            hub = PlainHub(size, cell=LINE, short=0, **HUBS[kind])
            case = Symbols(collective, name, size, n, root, segments, in_place=number % 2 == 1, hub=hub)
            for seed in range(2):
                values = case.inputs()
                RowMachine(case.programs, hub, values, seed).run()
                case.check_symbols(values)


def test_the_machine_would_see_a_missing_wait(monkeypatch):
    """Without waits for other streams, and for the receiver of a message by address, some order is wrong."""
    use_interpreter(monkeypatch)
    monkeypatch.setattr(shm, "RENDEZVOUS_BYTES", 1)

    def is_right(kept, seed):
        hub = PlainHub(4, cell=LINE, short=0, part=1 << 20)
        case = Symbols("allreduce", "recursive_doubling", 4, 40, in_place=True, hub=hub)
        for program in case.programs:
            for stream in (stream for streams in program.rounds for stream in streams):
                stream[:] = [one if one.kind in kept else Instruction(Kind.LOCAL) for one in stream]
        values = case.inputs()
        try:
            RowMachine(case.programs, hub, values, seed).run()
            case.check_symbols(values)
        except (AssertionError, KeyError):
            return False
        return True

    everything = set(Kind)
    assert all(is_right(everything, seed) for seed in range(30))
    for missing in (Kind.WAIT_READ, Kind.WAIT_STREAM):
        assert not all(is_right(everything - {missing}, seed) for seed in range(30)), missing
