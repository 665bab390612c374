"""All ranks of a schedule played in one process: its proof, its price, and a trace to draw.

`prove` plays with symbols: every chunk is the tuple of terms that were combined into it. `price` plays with clocks:
a message costs alpha + bytes * beta on its edge, combining costs bytes * gamma. Both follow the messages as MPI
matches them, in order per pair, with sends that wait for their receivers: what is free of deadlock here is free of
it in any MPI.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from collectives.analysis.cost_functions import CostFunctions, UniformNetwork
from collectives.schedule import semantics
from collectives.schedule.chunks import ChunkLayout
from collectives.schedule.semantics import Term, Value
from collectives.schedule.steps import Chunks, Copy, Recv, RecvReduce, Reduce, Schedule, Send, Step, numbers, show


class ScheduleError(Exception):
    """A schedule that is wrong: what is wrong with it, at which rank, round and step."""


class ScheduleLocation(NamedTuple):
    """A step of one rank's schedule."""

    rank: int
    round: int
    step: int


def _at(spot: ScheduleLocation, step: Step) -> str:
    return f"rank {spot.rank}, round {spot.round}, step {spot.step}: {_tell(step)}"


def _tell(step: Step) -> str:
    match step:
        case Send(peer, chunks):
            return f"Send of chunks {show(chunks)} to rank {peer}"
        case Recv(peer, chunks):
            return f"Recv of chunks {show(chunks)} from rank {peer}"
        case RecvReduce(peer, chunks, side):
            return f"RecvReduce of chunks {show(chunks)} from rank {peer} on the {side}"
        case Reduce(source, target, side):
            return f"Reduce of chunks {show(source)} into {show(target)} on the {side}"
        case Copy(source, target):
            return f"Copy of chunks {show(source)} to {show(target)}"


# ------------------------------------------------------------------------------------------ who meets whom


def match(schedules: Sequence[Schedule], count: int) -> dict[ScheduleLocation, ScheduleLocation]:
    """For every receive the send that it meets: the k-th from a rank meets the k-th to it.

    Raises
    ------
    ScheduleError
        If a message has no partner, goes to its own rank or to none, or is not as long as its partner.
    """
    sends: dict[tuple[int, int], deque[tuple[ScheduleLocation, Step]]] = defaultdict(deque)
    receives: list[tuple[ScheduleLocation, Recv | RecvReduce]] = []
    for rank, schedule in enumerate(schedules):
        for index, steps in enumerate(schedule):
            for position, step in enumerate(steps):
                if not isinstance(step, (Send, Recv, RecvReduce)):
                    continue
                spot = ScheduleLocation(rank, index, position)
                if step.peer == rank or not 0 <= step.peer < len(schedules):
                    raise ScheduleError(f"{_at(spot, step)}: no such peer among {len(schedules)} ranks")
                if isinstance(step, Send):
                    sends[rank, step.peer].append((spot, step))
                else:
                    receives.append((spot, step))
    partners: dict[ScheduleLocation, ScheduleLocation] = {}
    for spot, step in receives:
        queue = sends[step.peer, spot.rank]
        if not queue:
            raise ScheduleError(f"{_at(spot, step)}: deadlock, rank {step.peer} never sends this message")
        source, send = queue.popleft()
        assert isinstance(send, Send)
        if send.chunks != step.chunks and _lengths(send.chunks, count) != _lengths(step.chunks, count):
            raise ScheduleError(f"{_at(spot, step)}: does not fit {_at(source, send)}")
        partners[spot] = source
    for queue in sends.values():
        for spot, step in queue:
            raise ScheduleError(f"{_at(spot, step)}: deadlock, the message is never received")
    return partners


def _lengths(chunks: Chunks, count: int) -> list[int]:
    """Chunk numbers modulo the number of chunks, which determine the lengths of scratch chunks too."""
    return [chunk % count for chunk in numbers(chunks)]


def _causal(
    schedules: Sequence[Schedule], partners: dict[ScheduleLocation, ScheduleLocation]
) -> Iterator[tuple[str, int, int]]:
    """("begin" or "end", rank, round) in an order that respects cause: a round ends when all its partners began.

    Raises
    ------
    ScheduleError
        If ranks wait for one another in a circle.
    """
    needs: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for receive, send in partners.items():
        needs[receive.rank, receive.round].append((send.rank, send.round))
        needs[send.rank, send.round].append((receive.rank, receive.round))
    current = [0] * len(schedules)
    waiting: dict[int, list[int]] = defaultdict(list)
    ready = deque(range(len(schedules)))
    for rank, schedule in enumerate(schedules):
        if schedule:
            yield "begin", rank, 0
    while ready:
        rank = ready.popleft()
        while current[rank] < len(schedules[rank]):
            index = current[rank]
            late = next((peer for peer, its in needs[rank, index] if current[peer] < its), None)
            if late is not None:
                waiting[late].append(rank)
                break
            yield "end", rank, index
            current[rank] += 1
            if current[rank] < len(schedules[rank]):
                yield "begin", rank, current[rank]
            ready.extend(waiting.pop(rank, ()))
    stuck = [rank for rank, schedule in enumerate(schedules) if current[rank] < len(schedule)]
    if stuck:
        reports = []
        for rank in stuck:
            for peer, its in needs[rank, current[rank]]:
                if current[peer] < its:
                    steps = ", ".join(map(_tell, schedules[rank][current[rank]]))
                    reports.append(
                        f"rank {rank}, round {current[rank]} ({steps}) waits for round {its} of rank {peer}, "
                        f"which is in round {current[peer]}"
                    )
                    break
        raise ScheduleError("deadlock: " + "; ".join(reports))


def _check_hazards(rank: int, index: int, steps: Sequence[Step]) -> None:
    """Within a round nothing may land on a chunk that is being sent or that another message lands on."""
    busy: dict[int, int] = {}
    for position, step in enumerate(steps):
        if isinstance(step, Send):
            busy.update((chunk, position) for chunk in numbers(step.chunks))
    for position, step in enumerate(steps):
        if isinstance(step, Recv):
            for chunk in numbers(step.chunks):
                if chunk in busy:
                    raise ScheduleError(
                        f"{_at(ScheduleLocation(rank, index, position), step)}: hazard, chunk {chunk} is in use by "
                        f"step {busy[chunk]} of the same round, {_tell(steps[busy[chunk]])}"
                    )
                busy[chunk] = position
    for position, step in enumerate(steps):
        if isinstance(step, RecvReduce):
            for chunk in numbers(step.chunks):
                if chunk in busy and isinstance(steps[busy[chunk]], Recv):
                    raise ScheduleError(
                        f"{_at(ScheduleLocation(rank, index, position), step)}: "
                        f"hazard, {_tell(steps[busy[chunk]])} lands there too"
                    )


# ------------------------------------------------------------------------------------------ the proof


class _Symbol(NamedTuple):
    """Symbolic value of a chunk: its terms in order, and the number of the expression that combined them.

    Two expressions have the same number if they differ at most in the order of operands, which no operation that
    commutes can tell, down to the last bit.
    """

    terms: Value
    expression: int


class Proof(NamedTuple):
    """Result of a proof: properties of the schedule and its volumes, in chunks.

    Attributes
    ----------
    ordered : bool
        Whether every reduced value has its terms in rank order, so that non-commutative operations come out right.
    alike : bool
        Whether all ranks that get the same sum get it by the same additions, so that it has the same bits.
    rounds : int
        Messages in the longest chain of those that wait for one another, through one port out and one in per rank:
        the factor of alpha.
    messages : int
        Messages of all ranks together.
    sent, received, combined : tuple of int
        Chunks that each rank sends, receives, combines.
    """

    ordered: bool
    alike: bool
    rounds: int
    messages: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    combined: tuple[int, ...]


def prove(
    collective: str, schedules: Sequence[Schedule], root: int = 0, parts: int = 1, blocks: int | None = None
) -> Proof:
    """Play all ranks with symbols and check that everyone ends with what the collective means.

    Parameters
    ----------
    collective : str
        A name in `semantics.MEANINGS`.
    schedules : sequence of Schedule
        One per rank.
    root, parts : int
        The root of a rooted collective; how many chunks each block is cut in.
    blocks : int, optional
        How many blocks a vector is cut in, if not one per rank.

    Raises
    ------
    ScheduleError
        At the first deadlock, hazard, or wrong value, named with rank, round and step.
    """
    size = len(schedules)
    meaning = semantics.MEANINGS[collective]
    blocks = blocks or meaning.blocks(size)
    count = blocks * parts
    state: list[dict[int, _Symbol]] = [
        {
            chunk: _Symbol(((rank, chunk),), rank * count + chunk)
            for chunk in semantics.before(collective, rank, size, root, parts, blocks)
        }
        for rank in range(size)
    ]
    expressions: dict[frozenset[int], int] = {}
    heard = [1 << rank for rank in range(size)]
    sent, received, combined = [0] * size, [0] * size, [0] * size
    partners = match(schedules, count)
    begun: dict[tuple[int, int], int] = {}
    flying: dict[ScheduleLocation, list[_Symbol]] = {}

    def read(spot: ScheduleLocation, step: Step, chunks: Chunks) -> list[_Symbol]:
        mine = state[spot.rank]
        try:
            return [mine[chunk] for chunk in numbers(chunks)]
        except KeyError as missing:
            raise ScheduleError(f"{_at(spot, step)}: the rank does not have chunk {missing}") from None

    def join(spot: ScheduleLocation, step: RecvReduce | Reduce, target: Chunks, values: list[_Symbol]) -> None:
        mine = state[spot.rank]
        for chunk, old, new in zip(numbers(target), read(spot, step, target), values, strict=True):
            twice = set(old.terms).intersection(new.terms)
            if twice:
                raise ScheduleError(f"{_at(spot, step)}: chunk {chunk} already has {_terms(tuple(twice))}")
            terms = new.terms + old.terms if step.side == "left" else old.terms + new.terms
            joined = frozenset((old.expression, new.expression))
            mine[chunk] = _Symbol(terms, expressions.setdefault(joined, size * count + len(expressions)))
        combined[spot.rank] += len(values)

    for event, rank, index in _causal(schedules, partners):
        steps = schedules[rank][index]
        if event == "begin":
            _check_hazards(rank, index, steps)
            begun[rank, index] = heard[rank]
            for position, step in enumerate(steps):
                if isinstance(step, Send):
                    spot = ScheduleLocation(rank, index, position)
                    flying[spot] = read(spot, step, step.chunks)
                    sent[rank] += len(flying[spot])
            continue
        arrived: dict[int, list[_Symbol]] = {}
        for position, step in enumerate(steps):
            if isinstance(step, (Recv, RecvReduce)):
                source = partners[ScheduleLocation(rank, index, position)]
                values = arrived[position] = flying.pop(source)
                received[rank] += len(values)
                heard[rank] |= begun[source.rank, source.round]
                if isinstance(step, Recv):
                    state[rank].update(zip(numbers(step.chunks), values, strict=True))
        for position, step in enumerate(steps):
            spot = ScheduleLocation(rank, index, position)
            match step:
                case RecvReduce():
                    join(spot, step, step.chunks, arrived[position])
                case Reduce(chunks, target, _):
                    join(spot, step, target, read(spot, step, chunks))
                case Copy(chunks, target):
                    state[rank].update(zip(numbers(target), read(spot, step, chunks), strict=True))

    ordered = alike = True
    seen: dict[tuple[int, int], int] = {}
    for rank in range(size):
        for chunk, expected in semantics.after(collective, rank, size, root, parts, blocks).items():
            symbol = state[rank].get(chunk)
            found = None if symbol is None else symbol.terms
            if symbol is not None:
                alike &= seen.setdefault((chunk, len(expected)), symbol.expression) == symbol.expression
            if found == expected:
                continue
            if found is None or sorted(found) != list(expected):
                raise ScheduleError(f"rank {rank} does not get chunk {chunk} as required: {_differs(expected, found)}")
            ordered = False
        if meaning.synchronises and heard[rank] != (1 << size) - 1:
            missing = [peer for peer in range(size) if not heard[rank] >> peer & 1]
            raise ScheduleError(f"rank {rank} may leave before it has heard of ranks {missing}")
    rounds = round(price(schedules, ChunkLayout.packed((0,) * count), 1, UniformNetwork(1, 0, 0)).seconds)
    return Proof(ordered, alike, rounds, len(partners), tuple(sent), tuple(received), tuple(combined))


def _terms(value: Value) -> str:
    return ", ".join(f"chunk {chunk} of rank {rank}" for rank, chunk in sorted(value))


def _differs(expected: Value, found: Value | None) -> str:
    if found is None:
        return "it never arrives"
    lost: list[Term] = [term for term in expected if term not in found]
    foreign: list[Term] = [term for term in found if term not in expected]
    parts = ([f"lacks {_terms(tuple(lost))}"] if lost else []) + ([f"has {_terms(tuple(foreign))}"] if foreign else [])
    return " and ".join(parts) or f"terms added twice in {_terms(found)}"


# ------------------------------------------------------------------------------------------ the price


class SimulatedEvent(NamedTuple):
    """One message or one combination on the clock: `kind` is "message" or "combine"; times in seconds."""

    kind: str
    source: int
    target: int
    round: int
    chunks: Chunks
    bytes: float
    start: float
    end: float


class SimulatedTime(NamedTuple):
    """Completion time of each rank (seconds from a common start), and all events."""

    finish: tuple[float, ...]
    trace: tuple[SimulatedEvent, ...]

    @property
    def seconds(self) -> float:
        """Time until the last rank is done."""
        return max(self.finish)


def price(
    schedules: Sequence[Schedule], layout: ChunkLayout, itemsize: int, network: CostFunctions, trace: bool = False
) -> SimulatedTime:
    """Play all ranks with clocks: full duplex, one port out and one port in.

    A message flies when both its ranks have come to its round and its two ports are free; of several that could, the
    one that is listed first. What a round combines is combined when its messages are there.

    Parameters
    ----------
    schedules : sequence of Schedule
        One per rank.
    layout : Layout
        Lengths of the chunks, in elements of `itemsize` bytes.
    network : Network
        Costs per edge, and which ranks share a card.
    trace : bool
        Whether to record every message and combination.

    Raises
    ------
    ScheduleError
        If the ranks come to a standstill.
    """
    size = len(schedules)
    partners = match(schedules, len(layout.lengths))
    meets = {send: receive for receive, send in partners.items()} | partners
    sharers = _sharers(partners, network.cards)
    sends, receives = ({(spot.rank, spot.round) for spot in ends} for ends in (partners.values(), partners))
    weigh = _weigher(layout, itemsize)
    clock = [0.0] * size  # of each rank: when its last round ended
    out, into = [0.0] * size, [0.0] * size  # when its ports are free again
    current = [-1] * size  # the round that it is in
    open_messages = [0] * size  # of that round
    ready: list[tuple[float, int, int, ScheduleLocation]] = []  # sends that may fly: from when, place in the list, rank
    events: list[SimulatedEvent] = []

    def begin(rank: int) -> None:
        """Go to the next round that has messages; what can fly now gets ready."""
        while current[rank] + 1 < len(schedules[rank]):
            current[rank] += 1
            index, steps = current[rank], schedules[rank][current[rank]]
            mine = [i for i, step in enumerate(steps) if isinstance(step, (Send, Recv, RecvReduce))]
            open_messages[rank] = len(mine)
            for position in mine:
                spot = ScheduleLocation(rank, index, position)
                other = meets[spot]
                if current[other.rank] == other.round:
                    send = spot if isinstance(steps[position], Send) else other
                    heappush(ready, (max(clock[rank], clock[other.rank]), send.step, send.rank, send))
            if mine:
                return
            combine(rank)

    def combine(rank: int) -> None:
        """Combine the operands of the round in order."""
        for step in schedules[rank][current[rank]]:
            if isinstance(step, (RecvReduce, Reduce)):
                chunks = step.chunks if isinstance(step, RecvReduce) else step.source
                weight, start = weigh(chunks), clock[rank]
                clock[rank] += network.combine(weight, isinstance(step, RecvReduce) and (rank, current[rank]) in sends)
                if trace:
                    events.append(
                        SimulatedEvent("combine", rank, rank, current[rank], chunks, weight, start, clock[rank])
                    )

    for rank in range(size):
        begin(rank)
    finished = list(clock)  # when the messages of the current round have ended
    while ready:
        earliest, place, rank, send = heappop(ready)
        receive = meets[send]
        start = max(earliest, out[send.rank], into[receive.rank])
        if start > earliest:
            heappush(ready, (start, place, rank, send))
            continue
        chunks = schedules[send.rank][send.round][send.step].chunks  # type: ignore[union-attr]
        weight = weigh(chunks)
        both = (send.rank, send.round) in receives or (receive.rank, receive.round) in sends
        flight = network.message(send.rank, receive.rank, weight * sharers.get(send, 1), both)
        end = out[send.rank] = into[receive.rank] = start + flight
        if trace:
            events.append(SimulatedEvent("message", send.rank, receive.rank, send.round, chunks, weight, start, end))
        for spot in (send, receive):
            finished[spot.rank] = max(finished[spot.rank], end)
            open_messages[spot.rank] -= 1
            if not open_messages[spot.rank]:
                clock[spot.rank] = finished[spot.rank]
                combine(spot.rank)
                finished[spot.rank] = clock[spot.rank]
                begin(spot.rank)
    if any(open_messages):
        deque(_causal(schedules, partners), maxlen=0)  # names who waits for whom
    return SimulatedTime(tuple(clock), tuple(sorted(events, key=lambda event: event.start)))


def _sharers(
    partners: Mapping[ScheduleLocation, ScheduleLocation], nodes: Sequence[int] | None
) -> dict[ScheduleLocation, int]:
    """For every send to another node how many share its way: those that may fly at once, at the more crowded card."""
    if nodes is None:
        return {}
    crossing = [(s, r) for r, s in partners.items() if nodes[s.rank] != nodes[r.rank]]
    users: dict[tuple[int, int], tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))

    def leaving(spot: ScheduleLocation) -> tuple[int, int]:
        return nodes[spot.rank], 2 * spot.round

    def coming(spot: ScheduleLocation) -> tuple[int, int]:
        return nodes[spot.rank], 2 * spot.round + 1

    for send, receive in crossing:
        for card in (leaving(send), coming(receive)):
            senders, receivers = users[card]
            senders.add(send.rank)
            receivers.add(receive.rank)
    flows = {card: min(len(senders), len(receivers)) for card, (senders, receivers) in users.items()}
    return {send: max(flows[leaving(send)], flows[coming(receive)]) for send, receive in crossing}


def _weigher(layout: ChunkLayout, itemsize: int) -> Callable[[Chunks], int]:
    """A function from chunks to bytes, by running sums so that long ranges cost nothing."""
    count = len(layout.lengths)
    sums = [0]
    for length in layout.lengths:
        sums.append(sums[-1] + length)

    def upto(chunk: int) -> int:
        whole, rest = divmod(chunk, count)
        return whole * sums[-1] + sums[rest]

    def weigh(chunks: Chunks) -> int:
        return itemsize * sum(upto(part.stop) - upto(part.start) for part in chunks)

    return weigh
