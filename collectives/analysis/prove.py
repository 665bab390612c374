"""Proof of schedules: all ranks run in one process with symbols. A chunk's value is the tuple of its terms."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from collectives.analysis.cost_functions import UniformNetwork
from collectives.analysis.matching import ScheduleError, ScheduleLocation, causal_order, describe, match
from collectives.analysis.simulate import price
from collectives.schedule import semantics
from collectives.schedule.chunks import ChunkLayout
from collectives.schedule.semantics import Value
from collectives.schedule.steps import Chunks, Copy, Recv, RecvReduce, Reduce, Schedule, Send, Step, numbers


class _Symbol(NamedTuple):
    """Symbolic value of a chunk: its terms in order, and the number of the expression that combined them.

    Two expressions have the same number if they differ at most in the order of operands: a commutative operation gives
    both the same bits.
    """

    terms: Value
    expression: int


class Proof(NamedTuple):
    """Result of a proof: properties of the schedule and its volumes, in chunks."""

    ordered: bool  # every reduced value has its terms in rank order, as non-commutative operations need
    alike: bool  # ranks that get the same sum get it by the same additions, so with the same bits
    rounds: int  # messages in the longest chain, with one port out and one in per rank: the factor of alpha
    messages: int  # of all ranks together
    sent: tuple[int, ...]  # chunks that each rank sends
    received: tuple[int, ...]
    combined: tuple[int, ...]


def prove(
    collective: str, schedules: Sequence[Schedule], root: int = 0, parts: int = 1, blocks: int | None = None
) -> Proof:
    """Prove by execution with symbols that the ranks' schedules compute `collective`. Return properties and volumes.

    Parameters
    ----------
    collective : str
        A name in `semantics.MEANINGS`.
    schedules : sequence of Schedule
        One per rank.
    root, parts : int
        The root of a rooted collective. Number of chunks of each block.
    blocks : int, optional
        Number of blocks of a vector, if not one per rank.

    Raises
    ------
    ScheduleError
        At the first unmatched message, deadlock, hazard, or wrong value. Names rank, round and step. For results rank
        and chunk.
    """
    size = len(schedules)
    meaning = semantics.MEANINGS[collective]
    blocks = blocks or meaning.blocks(size)
    inputs = [semantics.before(collective, rank, size, root, parts, blocks) for rank in range(size)]
    outputs = [semantics.after(collective, rank, size, root, parts, blocks) for rank in range(size)]
    return prove_outputs(schedules, inputs, outputs, blocks * parts, meaning.synchronises)


def prove_outputs(
    schedules: Sequence[Schedule],
    inputs: Sequence[Sequence[int]],
    outputs: Sequence[Mapping[int, Value]],
    count: int,
    synchronises: bool = False,
) -> Proof:
    """As `prove`, for any exchange: every rank's input chunks, of `count`, and the values that it must hold after."""
    size = len(schedules)
    run = _SymbolicRun(schedules, inputs, count)
    for event, rank, index in causal_order(schedules, run.partners):
        (run.begin if event == "begin" else run.end)(rank, index)

    ordered = alike = True
    expressions: dict[tuple[int, int], int] = {}
    for rank in range(size):
        for chunk, expected in outputs[rank].items():
            symbol = run.state[rank].get(chunk)
            found = None if symbol is None else symbol.terms
            if symbol is None or found is None or sorted(found) != list(expected):
                raise ScheduleError(f"rank {rank} does not get chunk {chunk} as required: {_differs(expected, found)}")
            # equal terms in another association may round differently, so expressions are compared too
            alike &= expressions.setdefault((chunk, len(expected)), symbol.expression) == symbol.expression
            ordered &= found == expected
        if synchronises and run.heard[rank] != (1 << size) - 1:
            missing = [peer for peer in range(size) if not run.heard[rank] >> peer & 1]
            raise ScheduleError(f"rank {rank} may leave before it has heard of ranks {missing}")
    layout, network = ChunkLayout.packed((0,) * count), UniformNetwork(1, 0, 0)
    rounds = round(price(schedules, layout, 1, network, run.partners).seconds)
    volumes = tuple(run.sent), tuple(run.received), tuple(run.combined)
    return Proof(ordered, alike, rounds, len(run.partners), *volumes)


class _SymbolicRun:
    """State of a run with symbols: every rank's chunks, volumes, and the ranks that it depends on."""

    def __init__(self, schedules: Sequence[Schedule], inputs: Sequence[Sequence[int]], count: int) -> None:
        size = len(schedules)
        self.schedules = schedules
        self.partners = match(schedules, count)
        self.state = [
            {chunk: _Symbol(((rank, chunk),), rank * count + chunk) for chunk in chunks}
            for rank, chunks in enumerate(inputs)
        ]
        self.first_expression = size * count
        self.expressions: dict[frozenset[int], int] = {}
        self.heard = [1 << rank for rank in range(size)]  # bit mask of the ranks whose entry each rank depends on
        self.sent, self.received, self.combined = [0] * size, [0] * size, [0] * size
        self.begun: dict[tuple[int, int], int] = {}
        self.in_flight: dict[ScheduleLocation, list[_Symbol]] = {}

    def begin(self, rank: int, index: int) -> None:
        """Begin round `index` of a rank: check it for hazards, and read the chunks that it sends."""
        steps = self.schedules[rank][index]
        _check_hazards(rank, index, steps)
        self.begun[rank, index] = self.heard[rank]
        for position, step in enumerate(steps):
            if isinstance(step, Send):
                spot = ScheduleLocation(rank, index, position)
                self.in_flight[spot] = self.read(spot, step, step.chunks)
                self.sent[rank] += len(self.in_flight[spot])

    def end(self, rank: int, index: int) -> None:
        """End round `index` of a rank: store received chunks, then reduce and copy in the order listed."""
        arrived: dict[ScheduleLocation, list[_Symbol]] = {}
        places = [(ScheduleLocation(rank, index, at), step) for at, step in enumerate(self.schedules[rank][index])]
        # all messages of a round arrive before any local step reads
        for spot, step in places:
            if isinstance(step, (Recv, RecvReduce)):
                source = self.partners[spot]
                values = arrived[spot] = self.in_flight.pop(source)
                self.received[rank] += len(values)
                self.heard[rank] |= self.begun[source.rank, source.round]
                if isinstance(step, Recv):
                    self.state[rank].update(zip(numbers(step.chunks), values, strict=True))
        for spot, step in places:
            match step:
                case RecvReduce():
                    self.combine(spot, step, step.chunks, arrived[spot])
                case Reduce(chunks, target, _):
                    self.combine(spot, step, target, self.read(spot, step, chunks))
                case Copy(chunks, target):
                    self.state[rank].update(zip(numbers(target), self.read(spot, step, chunks), strict=True))

    def read(self, spot: ScheduleLocation, step: Step, chunks: Chunks) -> list[_Symbol]:
        try:
            return [self.state[spot.rank][chunk] for chunk in numbers(chunks)]
        except KeyError as missing:
            raise ScheduleError(f"{spot.of(step)}: the rank does not have chunk {missing}") from None

    def combine(self, spot: ScheduleLocation, step: RecvReduce | Reduce, target: Chunks, values: list[_Symbol]) -> None:
        for chunk, old, new in zip(numbers(target), self.read(spot, step, target), values, strict=True):
            if twice := set(old.terms).intersection(new.terms):
                raise ScheduleError(f"{spot.of(step)}: chunk {chunk} already has {_terms(tuple(twice))}")
            terms = new.terms + old.terms if step.side == "left" else old.terms + new.terms
            operands = frozenset((old.expression, new.expression))
            number = self.expressions.setdefault(operands, self.first_expression + len(self.expressions))
            self.state[spot.rank][chunk] = _Symbol(terms, number)
        self.combined[spot.rank] += len(values)


def _check_hazards(rank: int, index: int, steps: Sequence[Step]) -> None:
    """Raise ScheduleError if a `Recv` of a round overwrites a chunk that the round also sends or receives otherwise."""
    busy: dict[int, int] = {}
    # sends come first, so that a receive finds chunks that are still being sent
    places = [
        (at, step) for kind in (Send, Recv, RecvReduce) for at, step in enumerate(steps) if isinstance(step, kind)
    ]
    for at, step in places:
        spot = ScheduleLocation(rank, index, at)
        for chunk in numbers(step.chunks):
            other = steps[busy[chunk]] if chunk in busy else None
            if isinstance(step, Recv) and other is not None:
                raise ScheduleError(
                    f"{spot.of(step)}: hazard, chunk {chunk} is in use by step {busy[chunk]} of the same round, "
                    f"{describe(other)}"
                )
            if isinstance(step, RecvReduce) and isinstance(other, Recv):
                raise ScheduleError(f"{spot.of(step)}: hazard, {describe(other)} lands there too")
            if not isinstance(step, RecvReduce):
                busy[chunk] = at


def _terms(value: Value) -> str:
    return ", ".join(f"chunk {chunk} of rank {rank}" for rank, chunk in sorted(value))


def _differs(expected: Value, found: Value | None) -> str:
    if found is None:
        return "it never arrives"
    lost = tuple(term for term in expected if term not in found)
    foreign = tuple(term for term in found if term not in expected)
    parts = [f"{verb} {_terms(terms)}" for verb, terms in (("lacks", lost), ("has", foreign)) if terms]
    return " and ".join(parts) or f"terms added twice in {_terms(found)}"
