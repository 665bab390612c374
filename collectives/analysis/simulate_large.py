"""Simulated time of schedules of very many ranks: round by round, all ranks at once, in arrays.

`simulate.price` schedules every message by itself. That costs microseconds each. This module aligns the ranks'
rounds: a message of a rank's k-th round is received in the other's k-th round, with empty rounds where a rank is
ahead. Then a round depends only on the times at which the ranks come to it. Messages that share no port all start when
the later of their two ranks is ready. The others queue for their ports, like in `simulate.price`. Both give the same
times to the last bit, for the same network whose messages cost something.
"""

from array import array
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from collectives.analysis.cost_functions import CostFunctions
from collectives.analysis.matching import ScheduleError
from collectives.analysis.rank_symmetry import Integers, RankSymmetry
from collectives.schedule.chunks import ChunkLayout
from collectives.schedule.steps import Chunks, Recv, RecvReduce, Reduce, Round, Send

Times: TypeAlias = NDArray[np.float64]


class _MessageChunks(NamedTuple):
    """Ranges of chunks of `length` messages: range i has chunks `start[i]` .. `stop[i]` - 1 of message `owner[i]`."""

    length: int
    owner: Integers
    start: Integers
    stop: Integers

    def weigh(self, sums: Integers) -> Integers:
        """Number of elements of each message. `sums` are the prefix sums of the chunk lengths."""
        laps = len(sums) - 1

        def upto(chunk: Integers) -> Integers:
            begin: np.ndarray = chunk // laps * sums[-1] + sums[chunk % laps]
            return begin

        weights = np.zeros(self.length, np.int64)
        np.add.at(weights, self.owner, upto(self.stop) - upto(self.start))
        return weights


class _RoundState(NamedTuple):
    """Messages and local reductions of all ranks in one round, as arrays.

    `adding` has an entry for the first operand that each rank combines, for the second, and so on: the ranks, the
    position among all operands, and flags of operands that arrived while their rank was sending.
    """

    source: Integers  # sender of each message
    target: Integers
    place: Integers  # position in the sender's round
    messages: slice  # position of these messages among the messages of all rounds
    crowded: Integers  # messages that share a port with another
    both: NDArray[np.bool_]  # one of the message's ranks both sends and receives in the round
    adding: list[tuple[Integers, slice, NDArray[np.bool_]]]


class VectorSimulator:
    """Simulator of all ranks' schedules as arrays. `price` runs it for a layout and a network, any number of times.

    `schedules` has an iterable of rounds per rank, in order. Generators will do. With a `symmetry` it has the rounds
    of `symmetry.ranks`. ScheduleError if a message has no partner, or rounds cannot be aligned.
    """

    def __init__(self, schedules: Iterable[Iterable[Round]], symmetry: RankSymmetry | None = None) -> None:
        sends, receives, sums = (
            _StepTable() if symmetry is None else _MovedSteps(symmetry, columns) for columns in ((1, 2), (1, 2), (2,))
        )
        rank = -1
        for rank, schedule in zip(count() if symmetry is None else symmetry.ranks, schedules):
            for table in (sends, receives, sums):
                table.start(rank)
            for index, steps in enumerate(schedule):
                # a rank combines the operands of a round in this order
                added = 0
                for place, step in enumerate(steps):
                    if isinstance(step, Send):
                        sends.append(index, rank, step.peer, place, step.chunks)
                    elif isinstance(step, RecvReduce):
                        receives.append(index, step.peer, rank, place, ())
                        sums.append(index, added, rank, True, step.chunks)
                        added += 1
                    elif isinstance(step, Recv):
                        receives.append(index, step.peer, rank, place, ())
                    elif isinstance(step, Reduce):
                        sums.append(index, added, rank, False, step.source)
                        added += 1
        self.size = rank + 1 if symmetry is None else symmetry.size
        _align(sends.steps, receives.steps, sums.steps)
        sent, self._sent = sends.sorted()
        added_up, self._added = sums.sorted()
        self._round_states = list(_round_states(sent, added_up, self.size))

    def traffic(self, layout: ChunkLayout, itemsize: int) -> int:
        """Bytes that all ranks send together."""
        return itemsize * int(self._sent.weigh(_prefix_sums(layout)).sum())

    def price(self, layout: ChunkLayout, itemsize: int, network: CostFunctions) -> Times:
        """Completion time of each rank in seconds from a common start. `simulate.price` describes the arguments."""
        elements = _prefix_sums(layout)
        weights = itemsize * self._sent.weigh(elements)
        added = itemsize * self._added.weigh(elements)
        nodes = None if network.cards is None else np.asarray(network.cards)
        clock = np.zeros(self.size)
        for moment in self._round_states:
            source, target = moment.source, moment.target
            loads = weights[moment.messages]
            if nodes is not None:
                loads = loads * _sharers(nodes[source], nodes[target], source, target)
            ready = np.maximum(clock[source], clock[target])
            flights = np.broadcast_to(network.message(source, target, loads, moment.both), ready.shape)
            ends = ready + flights
            _queue(moment, ready, flights, ends)
            np.maximum.at(clock, source, ends)
            np.maximum.at(clock, target, ends)
            for ranks, places, both in moment.adding:
                clock[ranks] += network.combine(added[places], both)
        return clock


def _prefix_sums(layout: ChunkLayout) -> Integers:
    return np.concatenate([[0], np.cumsum(layout.lengths, dtype=np.int64)])


def _align(sends: Integers, receives: Integers, sums: Integers) -> None:
    """Renumber the rounds in place, so that each message is sent and received in rounds of the same number.

    A rank's rounds keep their order. Numbers grow until all fit: past their partner's, past those before.
    """
    orders = [_order(steps[:, [1, 2, 0, 3]]) for steps in (sends, receives)]  # as messages match
    ends = [steps[order] for steps, order in zip((sends, receives), orders, strict=True)]
    if len(sends) != len(receives) or (ends[0][:, 1:3] != ends[1][:, 1:3]).any():
        raise ScheduleError("sends and receives do not match")
    span = 1 + max((int(steps[:, 0].max()) for steps in (sends, receives, sums) if len(steps)), default=0)
    keys = sends[:, 1] * span + sends[:, 0], receives[:, 2] * span + receives[:, 0], sums[:, 2] * span + sums[:, 0]
    rounds, where = np.unique(np.concatenate(keys), return_inverse=True)
    sender, receiver, adder = np.split(where, np.cumsum([len(sends), len(receives)]))
    out, into = sender[orders[0]], receiver[orders[1]]
    number, rank = rounds % span, rounds // span
    place = np.arange(len(rounds))
    lane = rank * (2 * len(rounds) + 2 * span)  # so far apart that no rank's numbers reach the next one's
    while True:
        before = number.copy()
        latest = np.maximum(number[out], number[into])
        np.maximum.at(number, out, latest)
        np.maximum.at(number, into, latest)
        number = np.maximum.accumulate(number - place + lane) + place - lane
        if (number == before).all():
            break
        if number.max(initial=0) > len(rounds) + span:
            raise ScheduleError(
                "rounds cannot be aligned: a rank receives in two rounds what its peer sends in one; "
                "use `simulate.price`"
            )
    for steps, column in ((sends, sender), (receives, receiver), (sums, adder)):
        steps[:, 0] = number[column]


FLUSHED = 1 << 16
"""Integers of new steps that are kept in a list."""


def _order(rows: Integers) -> Integers:
    """Order of the rows by their columns, the first one first."""
    spans = [int(column.max(initial=0)) + 1 for column in rows.T]
    if prod(spans) >= 1 << 63:
        return np.lexsort(rows.T[::-1])
    return np.argsort(np.ravel_multi_index(tuple(rows.T), spans), kind="stable")  # much faster


class _StepTable:
    """Table of steps of one kind: four integers per step, its round first, and the ranges of its chunks."""

    def __init__(self) -> None:
        self._steps, self._parts = array("q"), array("q")
        self._new_steps, self._new_parts = list[int](), list[int]()  # lists grow faster than arrays
        self._count = 0

    def start(self, rank: int) -> None:
        """The steps that follow are of `rank`."""

    def append(self, index: int, one: int, other: int, place: int, chunks: Chunks) -> None:
        self._new_steps += (index, one, other, place)
        for part in chunks:
            self._new_parts += (self._count, part.start, part.stop)
        self._count += 1
        if len(self._new_steps) > FLUSHED:
            self._flush()

    def _flush(self) -> None:
        for table, new in ((self._steps, self._new_steps), (self._parts, self._new_parts)):
            table.extend(new)
            new.clear()

    @property
    def steps(self) -> Integers:
        """View of the integers as an array of shape (steps, 4), to be changed in place, when all have been appended."""
        self._flush()
        return np.frombuffer(self._steps, np.int64).reshape(-1, 4)

    def sorted(self) -> tuple[Integers, _MessageChunks]:
        """Steps sorted by their four integers, the round first, and their ranges of chunks in this order."""
        steps = self.steps
        owner, start, stop = np.frombuffer(self._parts, np.int64).reshape(-1, 3).T
        order = _order(steps)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return steps[order], _MessageChunks(len(order), places[owner], start, stop)


class _MovedSteps(_StepTable):
    """Table that adds to every step the steps that a symmetry moves it to. `columns` are the integers with ranks."""

    def __init__(self, symmetry: RankSymmetry, columns: tuple[int, ...]) -> None:
        super().__init__()
        self._symmetry, self._columns = symmetry, columns

    def start(self, rank: int) -> None:
        self._origin = rank // self._symmetry.per_node
        self._copies = np.arange(len(self._symmetry.classes[self._origin]))

    def append(self, index: int, one: int, other: int, place: int, chunks: Chunks) -> None:
        values = (index, one, other, place)
        rows = np.tile(np.array(values, np.int64), (len(self._copies), 1))
        for column in self._columns:
            rows[:, column] = self._symmetry.moved_rank(values[column], self._origin)
        self._steps.frombytes(rows.tobytes())
        for part in chunks:
            for starts, stops in self._symmetry.moved_chunks(part, self._origin):
                self._parts.frombytes(np.stack([self._count + self._copies, starts, stops], axis=1).tobytes())
        self._count += len(self._copies)


def _round_states(sent: Integers, added: Integers, size: int) -> Iterator[_RoundState]:
    """Yield, per round, the messages of all ranks and the local reductions."""
    last = max((int(column[-1, 0]) for column in (sent, added) if len(column)), default=-1)
    rounds = range(last + 2)
    begins, first = np.searchsorted(sent[:, 0], rounds), np.searchsorted(added[:, 0], rounds)
    for index in rounds[:-1]:
        messages = slice(begins[index], begins[index + 1])
        _, source, target, place = (column.copy() for column in sent[messages].T)
        sending, receiving = np.zeros((2, size), bool)
        sending[source] = receiving[target] = True
        adding, start = [], int(first[index])
        while start < first[index + 1]:
            turn = added[start, 1]
            stop = start + int(np.searchsorted(added[start : first[index + 1], 1], turn, "right"))
            ranks = added[start:stop, 2].copy()
            adding.append((ranks, slice(start, stop), sending[ranks] & (added[start:stop, 3] > 0)))
            start = stop
        both = receiving[source] | sending[target]
        yield _RoundState(source, target, place, messages, _crowded(source, target), both, adding)


def _crowded(source: Integers, target: Integers) -> Integers:
    """Indices of the messages whose sender sends, or whose receiver receives, another message in the round."""
    if not len(source):
        return source
    shared = (np.bincount(source)[source] > 1) | (np.bincount(target)[target] > 1)
    return np.flatnonzero(shared)


def _sharers(leaves: Integers, comes: Integers, source: Integers, target: Integers) -> Integers:
    """Shares of each message's busier network card, or 1 within a node. `leaves`, `comes`: nodes of the two ranks."""
    crossing = leaves != comes
    most = int(max(leaves.max(initial=0), comes.max(initial=0), source.max(initial=0), target.max(initial=0))) + 1

    def users(nodes: Integers, ranks: Integers) -> Integers:
        found, their = nodes[crossing], ranks[crossing]
        if len(their) and np.bincount(their).max() > 1:  # of several messages of a rank with a node, one counts
            found = np.unique(found * most + their) // most
        return np.bincount(found, minlength=most)

    flows = (np.minimum(users(nodes, source), users(nodes, target))[nodes] for nodes in (leaves, comes))
    return np.where(crossing, np.maximum(*flows), 1)


def _queue(moment: _RoundState, ready: Times, flights: Times, ends: Times) -> None:
    """Serialise messages that share ports, the earliest ready first. Write their completion times to `ends`."""
    if not len(moment.crowded):
        return
    columns = (moment.place, moment.source, moment.target, ready, flights)
    place, source, target, earliest, flight = (column[moment.crowded].tolist() for column in columns)
    out, into = dict.fromkeys(source, 0.0), dict.fromkeys(target, 0.0)
    waiting = [(earliest[i], place[i], source[i], i) for i in range(len(place))]
    heapify(waiting)
    while waiting:
        time, listed, rank, i = heappop(waiting)
        start = max(time, out[rank], into[target[i]])
        if start > time:
            heappush(waiting, (start, listed, rank, i))
            continue
        out[rank] = into[target[i]] = start + flight[i]
        ends[moment.crowded[i]] = out[rank]
