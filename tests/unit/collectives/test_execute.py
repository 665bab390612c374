"""Every schedule of the catalogue does on real memory what its collective means, over the loopback wire."""

import random
from itertools import accumulate

import numpy as np
import pytest
from support import argument_spellings
from support.loopback import LoopbackHub
from support.schedule_cases import ADDING, ENTRIES, JOINING, POISON, Case, advance, places
from support.transport_contract import spmd

from collectives.algorithms import catalog
from collectives.engine import interpreter
from collectives.engine.assembly import OnMemories, calling, flat
from collectives.engine.instructions import COPY, LANDING, SCRATCH, SOURCE, TARGET, Kind
from collectives.runtime.binding import binder, chunk_locations
from collectives.runtime.binding.binder import bind
from collectives.runtime.execution.program_memory import ElementArray, Task
from collectives.schedule.chunks import MemorySpan
from collectives.schedule.semantics import MEANINGS
from collectives.schedule.steps import Copy, Recv, RecvReduce, Reduce, Send, numbers, one, span

SIZES = [1, 2, 3, 4, 5, 7, 8]

every_entry = pytest.mark.parametrize(("collective", "name"), ENTRIES)


def counts(size):
    """Vectors shorter than the ranks, as long, one longer, and longer ones that do not divide."""
    return sorted({0, 1, size - 1, size, size + 1, 50})


@pytest.mark.sweep(4)
@every_entry
@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
def test_all_counts_and_roots(collective, name, in_place):
    """Step by step, twice on the same memory: what the first run left in scratch must not matter.

    Every root of every size has every second count, beginning with another one from root to root.
    """
    for size in SIZES:
        for number, root in enumerate(places(collective, size)):
            for n in counts(size)[(number + size + in_place) % 2 :: 2]:
                case = Case(collective, name, size, n, root, in_place=in_place)
                for turn in (0, 1):
                    case.fill(turn)
                    case.step_by_step()
                    case.check(turn)


@pytest.mark.sweep(4)
@every_entry
@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize(("segments", "cut"), [(2, 0), (3, 8), (1, 24)])
def test_segments_and_cut_messages(collective, name, in_place, segments, cut):
    """The schedule pipelined in segments; messages that combine cut in parts of 8 to 64 bytes; and both."""
    for size in (2, 3, 5, 8):
        for n in (size - 1, 50):
            case = Case(collective, name, size, n, size - 1, segments, in_place, cut)
            for turn in (0, 1):
                case.fill(turn)
                case.step_by_step()
                case.check(turn)


@pytest.mark.sweep(4)
@every_entry
def test_blocking_on_threads(collective, name):
    for size in (2, 3, 5):
        case = Case(collective, name, size, 50, size // 2, cut=32)
        for turn in range(2):
            case.fill(turn)
            case.blocking()
            case.check(turn)


@pytest.mark.sweep(4)
@every_entry
def test_in_whatever_order_ranks_advance(collective, name):
    chance = random.Random(1)
    case = Case(collective, name, 5, 50, 3, segments=2, cut=16)
    for turn in range(5):
        case.fill(turn)
        case.step_by_step(chance)
        case.check(turn)


@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize(
    ("collective", "name"), [e for e in ENTRIES if not MEANINGS[e[0]].vector and e[0] != "barrier"]
)
def test_blocks_of_any_length(collective, name, in_place):
    for lengths in ([0, 7, 0, 3], [9, 0, 0, 0], [1, 2, 3, 4], [0, 0, 0, 5]):
        for segments in (1, 2):
            blocks = lengths * (catalog.blocks(collective, name, 4) // 4)  # a row for every rank, where there are rows
            case = Case(collective, name, 4, 0, 1, segments, in_place, blocks=blocks)
            case.fill()
            case.step_by_step()
            case.check()


def test_ranks_may_run_step_by_step_or_blocking_as_they_like():
    case = Case("allreduce", "recursive_doubling", 5, 50)
    case.fill()

    def run(rank, size, wire):
        program = case.programs[rank]
        if rank % 2:
            program.run()
        else:
            program.start()
            while not program.advance():
                pass

    spmd(5, run)
    case.check()


# ------------------------------------------------------------------------------------------ what a program does


@pytest.fixture
def log(monkeypatch):
    """A `Case` that writes down what every rank does, in order: "start", "copy", "combine"."""

    class Watched(Case):
        def bind(self, rank, task, source, target):
            self.logs = getattr(self, "logs", None) or [[] for _ in range(self.size)]
            lines, wire, starts = self.logs[rank], self.hub.wire(rank), []

            def watched(bound):
                starts.extend(bound.starts)
                return bound

            send, receive = wire.send, wire.receive
            wire.send = lambda *message: watched(send(*message))
            wire.receive = lambda *message: watched(receive(*message))
            combining = JOINING if self.ordered else ADDING
            memories = [ElementArray(array, array.ctypes.data) for array in (source, target)]
            program = bind(task, *memories, wire, combining)
            instructions = flat(program.rounds)

            def finished(row):
                one = instructions[row]
                if one in starts:
                    lines.append("start")
                elif one.kind == Kind.LOCAL:
                    lines.append("copy" if one.reduction == COPY else "combine")
                elif isinstance(one.call, OnMemories):
                    lines.append("combine")

            monkeypatch.setitem(vars(program), "engine", interpreter.RowProgram(*program.rows))
            program.engine.finished = finished
            return program

    return Watched


def copies(collective, name, rank, size):
    """Whether the schedule itself has copies."""
    return any(
        isinstance(step, Copy) for steps in catalog.build(collective, name, rank, size, size - 1) for step in steps
    )


@pytest.mark.sweep(4)
@every_entry
def test_copies_are_only_of_what_stays_and_nothing_comes_for(log, collective, name):
    """One copy of its own block on ranks that gather, none where sums or messages come for it, none in place.

    Out of place the first messages leave the user's send buffer itself, wherever the rank stands: no copy before them.
    """
    for size in (2, 3, 5, 8):
        out, place = (log(collective, name, size, 50, size - 1, in_place=flag) for flag in (False, True))
        for case in (out, place):
            case.fill()
            case.step_by_step()
            case.check()
        for rank, lines in enumerate(out.logs):
            if copies(collective, name, rank, size):
                continue
            if "copy" in lines and "start" in lines:
                assert lines.index("start") < lines.index("copy")
            assert "copy" not in place.logs[rank]
            schedule = catalog.build(collective, name, rank, size, size - 1)
            comes = {c for steps in schedule for step in steps for c in numbers(chunk_locations.written(step))}
            stays = set(out.brings[rank]) & set(out.takes[rank]) - comes
            stays = {chunk for chunk in stays if out.lengths[chunk]}
            assert lines.count("copy") == bool(stays), f"rank {rank} of {size}"


def test_the_sums_of_a_ring_are_as_many_as_the_schedule_says(log):
    case = log("allreduce", "ring", 4, 48)
    case.fill()
    case.step_by_step()
    assert [lines.count("combine") for lines in case.logs] == [3] * 4
    assert [lines.count("start") for lines in case.logs] == [12] * 4  # a send and a receive in each of six rounds


def test_an_empty_vector_is_no_message(log):
    """Chunks without elements are neither sent nor added, but the news of a barrier is."""
    case = log("allreduce", "ring", 4, 0)
    case.fill()
    case.step_by_step()
    assert case.logs == [[], [], [], []]
    case = log("allreduce", "ring", 4, 2)
    case.fill()
    case.step_by_step()
    case.check()
    assert max(lines.count("combine") for lines in case.logs) <= 2
    case = log("barrier", "dissemination", 4, 0)
    case.step_by_step()
    assert [lines.count("start") for lines in case.logs] == [4] * 4  # a send and a receive in each of two rounds


def test_parts_are_added_while_others_come(log):
    """A long message lands in at most three slots, in turn, however many parts it has."""
    case = log("reduce", "linear", 4, 40, 0, cut=16)
    case.fill()
    case.step_by_step()
    case.check()
    assert case.logs[0].count("combine") == 3 * 20
    assert case.programs[0].nbytes == 3 * 16
    assert case.programs[1].nbytes == 0


@pytest.mark.parametrize("name", ["ring", "rabenseifner"])
def test_no_more_is_sent_ahead_than_has_come(name, monkeypatch):
    """Of a message in many parts, part i + WINDOW leaves when part i of what comes meanwhile is there."""
    size, part = 4, 16
    hub, parts = LoopbackHub(size), 5
    ahead = [0] * size
    furthest = [0] * size
    start, wire = hub.start, hub.wire

    def counting(message):
        if message.sends:
            rank = message.pair[0]
            ahead[rank] += 1
            furthest[rank] = max(furthest[rank], ahead[rank])
        start(message)

    def watched(rank):
        watched = wire(rank)
        receive = watched.receive

        def came():
            ahead[rank] -= 1

        def counted(*message):
            bound = receive(*message)
            return bound._replace(ends=[*bound.ends, calling(came)])

        watched.receive = counted
        return watched

    monkeypatch.setattr(hub, "start", counting)
    monkeypatch.setattr(hub, "wire", watched)
    case = Case("allreduce", name, size, size * parts * part // argument_spellings.DTYPE.itemsize, cut=part, hub=hub)
    case.fill()
    case.step_by_step()
    case.check()
    assert furthest == [binder.MESSAGE_WINDOW] * size
    assert ahead == [0] * size


@pytest.mark.sweep(4)
@every_entry
@pytest.mark.parametrize("segments", [1, 3])
def test_rounds_are_aligned(collective, name, segments):
    """What is sent in a round is received in the same round: long messages over a network are paced by that."""
    for size in range(1, 10):
        for root in places(collective, size):
            flying = {True: [], False: []}
            for rank in range(size):
                for index, steps in enumerate(catalog.build(collective, name, rank, size, root, segments)):
                    for step in steps:
                        if isinstance(step, (Send, Recv, RecvReduce)):
                            sends = isinstance(step, Send)
                            flying[sends].append((index, (rank, step.peer) if sends else (step.peer, rank)))
            assert sorted(flying[True]) == sorted(flying[False]), (size, root)


def test_scratch_is_as_large_as_what_passes_through():
    """A ring's reduce-scatter holds sums of all chunks but its own, and one chunk that lands; in place nothing less."""
    case = Case("reduce_scatter", "ring", 4, 40)
    assert [program.nbytes for program in case.programs] == [8 * (20 + 10)] * 4
    case = Case("allreduce", "ring", 4, 40)
    assert [program.nbytes for program in case.programs] == [8 * 10] * 4
    case = Case("broadcast", "mst", 4, 40)
    assert [program.nbytes for program in case.programs] == [0] * 4
    assert {SOURCE, TARGET, SCRATCH, LANDING} == {0, 1, 2, 3}


# ------------------------------------------------------------------------------------------ steps that no entry uses


def play(schedules, brings, takes, lengths=(3, 3), cut=0, combining=None, turns=2):
    """Run schedules of one's own on vectors of chunks; rank r brings 10 r + c as chunk c. Gives the targets."""
    hub, n = LoopbackHub(len(schedules)), sum(lengths)
    starts = list(accumulate(lengths[:-1], initial=0))
    lie = [{c: MemorySpan(m, starts[c], starts[c] + lengths[c]) for c in range(len(lengths))} for m in (SOURCE, TARGET)]
    targets, programs, sources = [], [], []
    for rank, schedule in enumerate(schedules):
        source = np.repeat([10 * rank + c for c in range(len(lengths))], lengths).astype(argument_spellings.DTYPE)
        target = np.full(n, POISON, argument_spellings.DTYPE)
        task = Task(
            tuple(map(tuple, schedule)),
            lengths,
            {c: lie[0][c] for c in brings[rank]},
            {c: lie[1][c] for c in takes[rank]},
            8,
            cut,
        )
        memories = [ElementArray(array, array.ctypes.data) for array in (source, target)]
        programs.append(bind(task, *memories, hub.wire(rank), combining or ADDING))
        targets.append(target)
        sources.append(source)
    for _ in range(turns):
        advance(programs)
    return [[int(target[start]) for start in starts] for target in targets]


def test_scratch_chunks_hold_a_message_for_later():
    """Rank 0 takes rank 1's vector into a spare copy, then adds it to its own and copies one chunk across."""
    schedules = [
        [[Recv(1, span(2, 4))], [Reduce(span(2, 4), span(0, 2), "right")], [Copy(one(3), one(0))]],
        [[Send(0, span(0, 2))]],
    ]
    assert play(schedules, [(0, 1), (0, 1)], [(0, 1), ()]) == [[11, 0 + 1 + 11], [POISON, POISON]]


def test_a_round_reads_before_it_writes():
    """Swapping by copies and by messages: what is sent or added is what was there when the round began."""
    both = span(0, 2)
    swap = [[[Send(1, both), RecvReduce(1, both), Copy(one(0), one(1))]], [[Send(0, both), RecvReduce(0, both)]]]
    for cut in (0, 8):
        assert play(swap, [(0, 1)] * 2, [(0, 1)] * 2, cut=cut) == [[10, 10], [10, 12]]
    overwrite = [[[Send(1, one(0)), Copy(one(1), one(0))]], [[Recv(0, one(0))]]]
    assert play(overwrite, [(0, 1), ()], [(0, 1), (0,)]) == [[1, 1], [0, POISON]]


def test_messages_from_one_peer_come_as_they_are_listed():
    """One is added and the other one is put down: neither may overtake, whole or in parts."""
    for cut in (0, 8):
        for lengths in ((6, 3), (3, 3)):
            schedules = [[[RecvReduce(1, one(0)), Recv(1, one(1))]], [[Send(0, one(0)), Send(0, one(1))]]]
            assert play(schedules, [(0, 1), (0, 1)], [(0, 1), ()], lengths, cut)[0] == [0 + 10, 11]
            schedules = [[[Recv(1, one(1)), RecvReduce(1, one(0))]], [[Send(0, one(1)), Send(0, one(0))]]]
            assert play(schedules, [(0, 1), (0, 1)], [(0, 1), ()], lengths, cut)[0] == [0 + 10, 11]
            schedules = [[[RecvReduce(1, one(0)), RecvReduce(1, one(1))]], [[Send(0, one(0)), Send(0, one(1))]]]
            assert play(schedules, [(0, 1), (0, 1)], [(0, 1), ()], lengths, cut)[0] == [0 + 10, 1 + 11]


def test_local_steps_take_effect_in_the_order_listed():
    steps = [Copy(one(0), one(2)), Reduce(one(1), one(0)), Copy(one(2), one(1))]
    assert play([[steps]], [(0, 1)], [(0, 1)]) == [[1, 0]]


def test_two_sums_into_one_chunk():
    """Letters of ranks 1 and 2 join those of rank 0 within one round, whole and in parts."""
    everything = span(0, 2)
    root = [[RecvReduce(1, everything, "right"), RecvReduce(2, everything, "right")]]
    schedules = [root, [[Send(0, everything)]], [[Send(0, everything)]]]
    for cut in (0, 8, 16):
        assert play(schedules, [(0, 1)] * 3, [(0, 1), (), ()], cut=cut)[0] == [30, 33]


def test_a_reduction_without_an_operation_is_refused():
    task = Task(((RecvReduce(1, one(0)),),), (1,), {0: MemorySpan(SOURCE, 0, 1)}, {0: MemorySpan(TARGET, 0, 1)}, 8)
    memory = ElementArray.allocate(1, argument_spellings.DTYPE)
    with pytest.raises(ValueError, match="no operation was given"):
        bind(task, memory, memory, LoopbackHub(2).wire(0))


def test_a_program_that_is_freed_keeps_nothing():
    case = Case("allreduce", "ring", 2, 4)
    program = case.programs[0]
    program.free()
    assert not program.memories
    with pytest.raises(RuntimeError, match="this program was freed"):
        program.run()


def test_calls_before_the_first_round_and_after_the_last():
    lines = []
    task = Task((), (2,), {0: MemorySpan(SOURCE, 0, 2)}, {0: MemorySpan(TARGET, 0, 2)}, 8)
    source, target = (
        ElementArray.allocate(2, argument_spellings.DTYPE),
        ElementArray.allocate(2, argument_spellings.DTYPE),
    )
    program = bind(
        task, source, target, LoopbackHub(1).wire(0),
        first=[lambda: source.array.__setitem__(slice(None), 5)],
        last=[lambda: lines.append(target.array.tolist())],
    )  # fmt: skip
    program.run()
    assert lines == [[5, 5]]


def test_words_spell_the_order():
    assert argument_spellings.spelled([0, 1], 1) == argument_spellings.join(
        argument_spellings.letters(0, 1), argument_spellings.letters(1, 1)
    )
    assert (argument_spellings.spelled([0, 1, 2], 4) != argument_spellings.spelled([0, 2, 1], 4)).all()
    first, second, third = (argument_spellings.letters(rank, 9) for rank in range(3))
    assert (
        argument_spellings.join(argument_spellings.join(first, second), third)
        == argument_spellings.join(first, argument_spellings.join(second, third))
    ).all()
    assert hex(int(argument_spellings.spelled([0, 1, 2], 1)[0])) == "0x7e3"
