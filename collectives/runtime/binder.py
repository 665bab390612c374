"""The one executor: a schedule bound to memory and a wire becomes a program that runs, starts, tests and frees.

Binding walks the schedule once and works out where every chunk lies at every step: the first touch of a chunk reads
the user's send buffer, whatever is written goes to the receive buffer, and to scratch where there is none. What
remains is a flat list of calls without arguments. A blocking collective runs through it; in a non-blocking one the
position in the list is the whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives.schedule.chunks import Place, aligned, even, joined, split
from collectives.schedule.steps import Chunks, Copy, Recv, RecvReduce, Reduce, Schedule, Send, Side, Step, numbers
from collectives.transport.wire import Piece, Swapping, Wait, Wire

SOURCE, TARGET, SCRATCH, LANDING = range(4)
"""The memories that places name: the user's two buffers, room for chunks that are only passing through, and room for
what has arrived and waits to be combined."""

SLOTS = 3
"""Segments of one message that may be on their way at a time: one lands while another is combined."""

WINDOW = 2
"""Segments of one message that are sent over a network before one has come. What is under way beyond what the network
holds fills its queues, and delays the receipts that keep TCP going."""

SHORT = 4096
"""Bytes up to which messages need no receiver to be on their way: any MPI buffers them."""


_NOTHING: list[Callable[[], object]] = []

_NO_OPERATION = "the schedule combines, but no operation was given"


class Combining(Protocol):
    """A reduction ready to be bound: `bind(left, right, out)` gives the call that does out = left op right."""

    def bind(self, left: Any, right: Any, out: Any) -> Callable[[], object]:
        """The call for these 1-D arrays; `out` may be either of the others."""
        ...


class Lane(Protocol):
    """Where local work is put that goes on after the call has returned, one piece after another.

    Before messages start that follow such work, and at the end, programs wait for what the lane then holds.
    """

    ended: Wait
    """For the end of the work that was marked last."""

    def empty(self, count: int, dtype: Any) -> Any:
        """Fresh memory for `count` elements, as an array that work on the lane can use."""
        ...

    def working(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call, what it begins put on the lane."""
        ...

    def mark(self) -> None:
        """Remember all that the lane holds now."""
        ...

    def follow(self, *arrays: Any) -> None:
        """Put work from now on behind all that goes on with these arrays."""
        ...


class Task(NamedTuple):
    """What is to be done, by one rank: everything that decides a program but the memory and the wire.

    Attributes
    ----------
    schedule : Schedule
        This rank's rounds.
    lengths : sequence of int
        Elements of each chunk.
    source, target : mapping of chunk to Place
        Where the rank's chunks lie at first, and where chunks that it ends with must lie. Places name SOURCE and
        TARGET, which may be the same memory.
    itemsize : int
        Bytes of an element.
    segment : int
        Messages longer than this many bytes are cut, so that one part is combined while the next arrives. The same
        on all ranks. 0: never cut.
    """

    schedule: Schedule
    lengths: Sequence[int]
    source: Mapping[int, Place]
    target: Mapping[int, Place]
    itemsize: int
    segment: int = 0


class Memory(NamedTuple):
    """A 1-D array of elements and the address where it begins."""

    array: Any
    address: int

    @classmethod
    def allocate(cls, count: int, dtype: Any, xp: Any = np) -> Memory:
        """Fresh memory for `count` elements."""
        array = xp.empty(count, dtype)
        return cls(array, _address(array))


def _address(array: Any) -> int:
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(array.__cuda_array_interface__["data"][0])


class Program:
    """A bound schedule. `run` does all of it; `start` and `advance` do it bit by bit.

    Attributes
    ----------
    calls, opening, rest : tuple
        Everything, in order, what `run` calls; its part up to the first wait, what `start` calls; and the rest.
    begins : tuple of (int, int)
        Rounds that have steps, and where in `calls` each begins.
    position, first : int
        Where in `calls` it stands, and the first wait, where it stands when it was started.
    nbytes : int
        Memory that the program holds besides the user's.
    lane : Lane or None
        Where its local work goes on.
    swap : Swapping or None
        All that it does, if that is no more than a message for a message.
    broken : bool
        Whether a run of it was broken off, after which its messages may still be under way.
    """

    swap: Swapping | None = None
    broken = False
    begins: tuple[tuple[int, int], ...] = ()

    def __init__(
        self,
        calls: Sequence[Callable[[], object]],
        tests: Sequence[Callable[[], bool] | None],
        wire: Wire,
        nbytes: int,
        keep: object,
        lane: Lane | None = None,
    ) -> None:
        self.calls = tuple(calls)
        self._tests: tuple[Callable[[], bool] | None, ...] = tuple(tests)
        self.first = next((i for i, test in enumerate(self._tests) if test is not None), len(self.calls))
        self.opening, self.rest = self.calls[: self.first], self.calls[self.first :]
        self.position = self.first
        self._kept = [keep]
        self.wire = wire
        self.nbytes = nbytes
        self.lane = lane

    @property
    def waits(self) -> tuple[bool, ...]:
        """Which of the calls wait."""
        return tuple(test is not None for test in self._tests)

    def run(self) -> None:
        """Do everything, waiting where need be."""
        for call in self.calls:
            call()

    def start(self) -> None:
        """Begin: goes up to the first wait. `finish`, or `advance` until it says so, must follow."""
        for call in self.opening:
            call()

    def finish(self) -> None:
        """Do all that is left, waiting where need be."""
        calls = self.calls[self.position :]
        self.position = self.first
        for call in calls:
            call()

    def advance(self) -> bool:
        """Go on as far as possible without waiting; whether the end is reached."""
        calls, tests, position = self.calls, self._tests, self.position
        try:
            while position < len(calls):
                test = tests[position]
                if test is None:
                    calls[position]()
                elif not test():
                    return False
                position += 1
            position = self.first
            return True
        finally:
            self.position = position

    def keep(self, what: object) -> None:
        """Keep alive what the calls use, as long as the program is bound."""
        self._kept.append(what)

    def free(self) -> None:
        """Give back requests and memory."""
        self.calls = self.opening = self.rest = (_freed,)
        self._tests = (None,)
        self._kept.clear()
        self.wire.free()


def _freed() -> None:
    raise RuntimeError("this program was freed")


def bind(
    task: Task,
    source: Memory,
    target: Memory,
    wire: Wire,
    combining: Combining | None = None,
    lane: Lane | None = None,
    first: Iterable[Callable[[], object] | Wait] = (),
    last: Iterable[Callable[[], object] | Wait] = (),
) -> Program:
    """The program that carries out the task on this memory.

    Parameters
    ----------
    task : Task
        What to do.
    source, target : Memory
        The user's buffers; the same one for a call in place.
    wire : Wire
        How messages travel. The program owns it and frees it.
    combining : Combining, optional
        The reduction; needed when the schedule combines.
    lane : Lane, optional
        Where scratch is allocated and local work done; by default in NumPy, at once.
    first, last : calls
        Done before the first round and after the last, such as staging.
    """
    binder = _Binder(task, [source, target], wire, combining, lane)
    for call in first:
        binder.do(call)
    binder.rounds()
    for call in last:
        binder.work(call)
    binder.join()
    swap = binder.swap()
    halves = None if swap is None else swap.halves(source.array, target.array)
    if halves is not None:
        binder.calls, binder.tests = [], []
        for half in halves:
            if half is not None:
                binder.do(half)
    program = Program(binder.calls, binder.tests, wire, binder.nbytes, binder.memories, lane)
    program.swap = swap
    program.begins = tuple(binder.begins) if halves is None else tuple(binder.begins[:1])
    return program


class _Sent(NamedTuple):
    """A part of a message on its way out, and the memory that may not change before it has left."""

    message: Any
    places: list[Place]


class _Action(NamedTuple):
    """Local work of a step: `message` must have come first (None: all of the round); then `following` may start."""

    step: int
    message: Any
    calls: list[Callable[[], object]]
    onto: list[Place]
    following: Any = None
    place: int = 0


class _Shape(NamedTuple):
    """How a round combines what arrives.

    Attributes
    ----------
    straight : bool
        From where the senders put it, as it is awaited; otherwise it lands first.
    slots : list of int
        How many parts of each message have a landing place of their own.
    landing : int
        Elements of room for all these.
    changing : list of Place
        Where the results go.
    """

    straight: bool
    slots: list[int]
    landing: int
    changing: list[Place]


class _Binder:
    """Emits the calls of one program, with the places of all chunks as they move."""

    def __init__(
        self, task: Task, memories: list[Memory], wire: Wire, combining: Combining | None, lane: Lane | None
    ) -> None:
        self.task, self.wire, self.combining, self.lane = task, wire, combining, lane
        self.working = lane is not None  # whatever the lane holds already came before this program
        self.calls: list[Callable[[], object]] = []
        self.tests: list[Callable[[], bool] | None] = []
        self.home: dict[int, Place] = dict(task.source)
        self.written = _written(task.schedule)
        self.exchanges: list[list[Any]] = []
        self.begins: list[tuple[int, int]] = []
        self.scratch: dict[int, Place] = {}
        room = 0
        for chunk in sorted(self.written.difference(task.target)):
            self.scratch[chunk] = Place(SCRATCH, room, room + self._length(chunk))
            room += self._length(chunk)
        self.shapes: list[_Shape] = []
        for steps in task.schedule:
            self.shapes.append(self._shape(steps))
            self._written_by(steps)
        self.home = dict(task.source)
        landing = max((shape.landing for shape in self.shapes), default=0)
        dtype = memories[0].array.dtype
        self.memories = [*memories, *(Memory.allocate(count, dtype, lane or np) for count in (room, landing))]
        self.nbytes = (room + landing) * task.itemsize

    # -------------------------------------------------------------------------------- where things lie

    def _length(self, chunk: int) -> int:
        return self.task.lengths[chunk % len(self.task.lengths)]

    def _homes(self, chunks: Chunks) -> list[Place]:
        return [self.home[chunk] for chunk in numbers(chunks)]

    def _goals(self, chunks: Chunks) -> list[Place]:
        """Where the chunks go when they are written."""
        target = self.task.target
        return [target[chunk] if chunk in target else self.scratch[chunk] for chunk in numbers(chunks)]

    def _array(self, place: Place) -> Any:
        return self.memories[place.memory].array[place.start : place.stop]

    def _piece(self, place: Place) -> Piece:
        size = self.task.itemsize
        address = self.memories[place.memory].address + place.start * size
        return Piece(address, (place.stop - place.start) * size)

    def _cuts(self, step: Send | Recv | RecvReduce) -> Sequence[int]:
        """Elements in each part of a message: none if it would be empty, one or several by its length."""
        elements = sum(map(self._length, numbers(step.chunks)))
        if not elements:
            return () if step.chunks else (0,)
        grain = self.wire.grain(step.peer, elements * self.task.itemsize)
        limit = self.task.segment if grain is None else grain
        part = max(1, limit // self.task.itemsize) if limit else elements
        return even(elements, -(-elements // part))

    def _written_by(self, steps: Sequence[Step]) -> None:
        """Where chunks lie after the round."""
        for step in steps:
            if not isinstance(step, Send):
                chunks = step.chunks if isinstance(step, (Recv, RecvReduce)) else step.target
                self.home.update(zip(numbers(chunks), self._goals(chunks), strict=True))

    def _shape(self, steps: Sequence[Step]) -> _Shape:
        """How the round combines what arrives, with chunks where they lie before it.

        Of a message that is not combined straight, the parts take turns in a few landing places if it is the first,
        unless its sender sends another, which would overtake the last of them. Those of further peers may not wait
        for the first: what it sends may hang on theirs.
        """
        arrivals = [step for step in steps if isinstance(step, RecvReduce)]
        changing = joined(goal for step in arrivals for goal in self._goals(step.chunks))
        if self._straight(steps, arrivals, changing):
            return _Shape(True, [0] * len(arrivals), 0, changing)
        cuts = [self._cuts(step) for step in arrivals]
        slots = [len(parts) for parts in cuts]
        senders = [step.peer for step in steps if isinstance(step, (Recv, RecvReduce))]
        if slots and senders.count(arrivals[0].peer) == 1 and self._takes_turns(arrivals[0]):
            slots[0] = min(slots[0], SLOTS)
        room = sum(count * max(parts, default=0) for count, parts in zip(slots, cuts, strict=True))
        return _Shape(False, slots, room, changing)

    def _takes_turns(self, step: Step) -> bool:
        """Whether parts of a message are combined one by one while others are on their way over a network."""
        if not isinstance(step, RecvReduce) or len(self._cuts(step)) < 2:
            return False
        return self.wire.grain(step.peer, self._bytes(step.chunks)) is None

    def _straight(self, steps: Sequence[Step], arrivals: Sequence[RecvReduce], changing: list[Place]) -> bool:
        """Whether what a round combines is combined straight from where its senders put it, as it is awaited.

        Not if another step must take effect first, and not if what changes may still be on its way out.
        """
        first = next((index for index, step in enumerate(steps) if isinstance(step, (Reduce, Copy))), len(steps))
        if self.lane is not None or any(isinstance(step, RecvReduce) for step in steps[first:]):
            return False
        sizes = [(step.peer, self._bytes(step.chunks)) for step in arrivals]
        if any(self.wire.grain(peer, nbytes) is None for peer, nbytes in sizes):
            return False
        if len(arrivals) > 1 and any(len(self._cuts(step)) > 1 for step in arrivals):
            return False  # parts of several messages would have to take turns
        sent: list[int] = []
        for step in steps:
            if isinstance(step, Send):
                leaves = self.wire.leaves(step.peer, self._bytes(step.chunks), sent.count(step.peer))
                if not leaves and _overlap(self._homes(step.chunks), changing):
                    return False
                sent.append(step.peer)
        return True

    def _bytes(self, chunks: Chunks) -> int:
        return sum(map(self._length, numbers(chunks))) * self.task.itemsize

    # -------------------------------------------------------------------------------- emitting calls

    def do(self, call: Callable[[], object] | Wait) -> None:
        """A call that never waits, or one that only waits."""
        self.calls.append(call.wait if isinstance(call, Wait) else call)
        self.tests.append(call.test if isinstance(call, Wait) else None)

    def work(self, call: Callable[[], object] | Wait) -> None:
        """A call that changes chunks, on the lane if there is one."""
        if self.lane is None or isinstance(call, Wait):
            self.do(call)
        else:
            self.do(self.lane.working(call))
            self.working = True

    def join(self) -> None:
        """Wait for the work that is still going on."""
        if self.lane is not None and self.working:
            self.do(self.lane.mark)
            self.do(self.lane.ended)
        self.working = False

    def start(self, messages: Sequence[Any]) -> None:
        """Begin these messages, when the work before them has ended."""
        if messages:
            self.join()
            for call in self.wire.starting(messages):
                self.do(call)

    def wait(self, messages: Sequence[Any]) -> None:
        """Go on when these messages have ended."""
        if messages:
            for wait in self.wire.waiting(messages):
                self.do(wait)

    def swap(self) -> Swapping | None:
        """All that was emitted as one swap, if it is no more than a single round's messages."""
        if len(self.exchanges) != 1:
            return None
        messages = self.exchanges[0]
        if len(self.calls) != len(self.wire.starting(messages)) + len(self.wire.waiting(messages)):
            return None
        return self.wire.swap(messages)

    def rounds(self) -> None:
        """All rounds. Chunks that stay as they were brought are copied home while the first messages fly."""
        kept = [c for c in sorted(self.task.target) if c in self.home and c not in self.written]
        copies = self._copying([self.home[c] for c in kept], [self.task.target[c] for c in kept])
        for index, (steps, shape) in enumerate(zip(self.task.schedule, self.shapes, strict=True)):
            if steps:
                self.begins.append((index, len(self.calls)))
                (self._paced if self._long(steps) else self._round)(steps, shape, copies)
                copies = []
        for copy in copies:
            self.work(copy)

    def _round(self, steps: Sequence[Step], shape: _Shape, meanwhile: Iterable[Callable[[], object]]) -> None:
        """Receives and sends start at once; what must be combined is, part by part, as it comes."""
        sends = [sent for step in steps if isinstance(step, Send) for sent in self._sent(step, shape.changing)]
        receives = [
            (index, message)
            for index, step in enumerate(steps)
            if isinstance(step, Recv)
            for message in self._received(step)
        ]
        actions = self._actions(steps, shape)
        arrivals = [(action.step, action.message) for action in actions if action.message is not None]
        come = [message for _, message in sorted([*receives, *arrivals], key=itemgetter(0))]  # as they are listed
        leave = [sent.message for sent in sends]
        short = sum(self._piece(place).nbytes for sent in sends for place in sent.places) <= SHORT
        messages = [*leave, *come] if short else [*come, *leave]  # what leaves at once may as well leave first
        self.exchanges.append(messages)
        following = {id(action.following) for action in actions}
        self.start([message for message in messages if id(message) not in following])
        for call in meanwhile:
            self.work(call)
        pending = {id(message): message for message in messages}
        if not any(self._takes_turns(step) for step in steps):
            self._settle(pending, messages)  # one wait for all costs least, and a stream wants it
        changing = joined(place for action in actions for place in action.onto)
        leaving = [sent for sent in sends if _overlap(sent.places, changing)]
        for action in actions:
            if action.message is None:
                self._settle(pending, messages)
            else:
                held = (
                    sent.message
                    for sent in leaving
                    if id(sent.message) in pending and _overlap(sent.places, action.onto)
                )
                self._settle(pending, [action.message, *held])
            for call in action.calls:
                self.work(call)
            if action.following is not None:
                self.start([action.following])
        self._settle(pending, messages)

    def _long(self, steps: Sequence[Step]) -> bool:
        """Whether a round is nothing but messages over a network, of chunks of their own, some of them long."""
        messages = [step for step in steps if isinstance(step, (Send, Recv, RecvReduce))]
        if len(messages) < len(steps) or all(len(self._cuts(step)) <= WINDOW for step in messages):
            return False
        if any(self.wire.grain(step.peer, self._bytes(step.chunks)) is not None for step in messages):
            return False
        ways = {(step.peer, isinstance(step, Send)) for step in messages}
        changing = [chunk for step in messages if isinstance(step, RecvReduce) for chunk in numbers(step.chunks)]
        leaving = {chunk for step in messages if isinstance(step, Send) for chunk in numbers(step.chunks)}
        apart = len(set(changing)) == len(changing) and leaving.isdisjoint(changing)
        return apart and len(ways) == len(messages)

    def _paced(self, steps: Sequence[Step], shape: _Shape, meanwhile: Iterable[Callable[[], object]]) -> None:
        """The messages advance side by side, part by part: more is sent when as much has come.

        That is safe since rounds are aligned: nobody is further than a peer lets it be, part by part.
        """
        sends = [step for step in steps if isinstance(step, Send)]
        leave = [[(sent.message, _NOTHING) for sent in self._sent(step, shape.changing)] for step in sends]
        come = [[(message, _NOTHING) for message in self._received(step)] for step in steps if isinstance(step, Recv)]
        slots, actions = shape.slots, self._actions(steps, shape)
        land = [
            [(action.message, action.calls) for action in actions if action.step == index]
            for index, step in enumerate(steps)
            if isinstance(step, RecvReduce)
        ]
        ahead = [*map(len, come), *slots, *(WINDOW for _ in leave)]
        streams = [*come, *land, *leave]
        self.start([message for parts, few in zip(streams, ahead) for message, _ in parts[:few]])
        for call in meanwhile:
            self.work(call)
        for index in range(max(map(len, streams))):
            for parts, few in zip(streams, ahead):
                if index < len(parts):
                    message, calls = parts[index]
                    self.wait([message])
                    for call in calls:
                        self.work(call)
                    self.start([message for message, _ in parts[index + few : index + few + 1]])

    def _settle(self, pending: dict[int, Any], messages: Iterable[Any]) -> None:
        """Wait for those of the messages that are still pending."""
        self.wait([pending.pop(id(message)) for message in messages if id(message) in pending])

    def _sent(self, step: Send, changing: list[Place]) -> Iterator[_Sent]:
        for rows in split(aligned(self._homes(step.chunks)), self._cuts(step)):
            places = [place for (place,) in rows]
            stays = not _overlap(places, changing)
            yield _Sent(self.wire.send(step.peer, list(map(self._piece, places)), stays), places)

    def _received(self, step: Recv) -> Iterator[Any]:
        goals = self._goals(step.chunks)
        self.home.update(zip(numbers(step.chunks), goals, strict=True))
        for rows in split(aligned(goals), self._cuts(step)):
            yield self.wire.receive(step.peer, [self._piece(place) for (place,) in rows])

    def _actions(self, steps: Sequence[Step], shape: _Shape) -> list[_Action]:
        """The local work of a round in the order in which it must take effect."""
        actions: list[_Action] = []
        landing, room = 0, iter(shape.slots)
        for index, step in enumerate(steps):
            if isinstance(step, RecvReduce):
                cuts, slots = self._cuts(step), next(room)
                if shape.straight:
                    actions.extend(_Action(index, part, [], []) for part in self._straightly(step, cuts))
                    continue
                actions.extend(self._arrivals(index, step, cuts, slots, landing))
                landing += slots * max(cuts, default=0)
            elif isinstance(step, Reduce):
                calls, goals = self._reducing(self._homes(step.source), step.target, step.side)
                actions.append(_Action(index, None, calls, goals))
            elif isinstance(step, Copy):
                goals = self._goals(step.target)
                actions.append(_Action(index, None, self._copying(self._homes(step.source), goals), goals))
                self.home.update(zip(numbers(step.target), goals, strict=True))
        return actions

    def _arrivals(self, place: int, step: RecvReduce, cuts: Sequence[int], slots: int, landing: int) -> list[_Action]:
        """The parts of one message: each lands in a slot and is combined from there."""
        homes, goals = self._homes(step.chunks), self._goals(step.chunks)
        self.home.update(zip(numbers(step.chunks), goals, strict=True))
        actions: list[_Action] = []
        for index, rows in enumerate(split(aligned(homes, goals), cuts)):
            start = landing + index % slots * max(cuts)
            slot = Place(LANDING, start, start + cuts[index])
            calls, onto = [], []
            for home, goal in rows:
                length = home.stop - home.start
                calls.append(self._combine(Place(LANDING, start, start + length), home, goal, step.side))
                onto.append(goal)
                start += length
            message = self.wire.receive(step.peer, [self._piece(slot)] if cuts[index] else [])
            actions.append(_Action(place, message, calls, onto))
        return [
            action._replace(following=actions[index + slots].message if index + slots < len(actions) else None)
            for index, action in enumerate(actions)
        ]

    def _straightly(self, step: RecvReduce, cuts: Sequence[int]) -> Iterator[Any]:
        """The parts of a message that is combined where it lies."""
        if self.combining is None:
            raise ValueError(_NO_OPERATION)
        homes, goals = self._homes(step.chunks), self._goals(step.chunks)
        self.home.update(zip(numbers(step.chunks), goals, strict=True))
        bind, left = self.combining.bind, step.side == "left"

        def combine(incoming: Any, mine: Any, out: Any) -> Callable[[], object]:
            return bind(incoming, mine, out) if left else bind(mine, incoming, out)

        for rows in split(aligned(homes, goals), cuts):
            arrays = [(self._array(home), self._array(goal)) for home, goal in rows]
            yield self.wire.combine(step.peer, arrays, combine)

    def _reducing(
        self, sources: list[Place], target: Chunks, side: Side
    ) -> tuple[list[Callable[[], object]], list[Place]]:
        homes, goals = self._homes(target), self._goals(target)
        self.home.update(zip(numbers(target), goals, strict=True))
        rows = aligned(sources, homes, goals)
        return [self._combine(source, home, goal, side) for source, home, goal in rows], goals

    def _combine(self, incoming: Place, mine: Place, goal: Place, side: Side) -> Callable[[], object]:
        if self.combining is None:
            raise ValueError(_NO_OPERATION)
        left, right = (incoming, mine) if side == "left" else (mine, incoming)
        return self.combining.bind(self._array(left), self._array(right), self._array(goal))

    def _copying(self, sources: Iterable[Place], goals: Iterable[Place]) -> list[Callable[[], object]]:
        return [
            partial(_copy, self._array(goal), self._array(source))
            for source, goal in aligned(sources, goals)
            if self._piece(source) != self._piece(goal)
        ]


def _copy(goal: Any, source: Any) -> None:
    goal[...] = source


def _written(schedule: Schedule) -> set[int]:
    """All chunks that some step writes."""
    chunks: set[int] = set()
    for step in chain.from_iterable(schedule):
        if isinstance(step, (Recv, RecvReduce)):
            chunks.update(numbers(step.chunks))
        elif isinstance(step, (Reduce, Copy)):
            chunks.update(numbers(step.target))
    return chunks


def _overlap(one: Iterable[Place], other: Iterable[Place]) -> bool:
    return any(a.memory == b.memory and a.start < b.stop and b.start < a.stop for a in one for b in other)
