"""Assembly of a program: instructions of Python objects become the arrays that both engines run.

A program is a list of rounds, a round a list of streams, a stream a list of instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives.engine.instructions import (
    ABSOLUTE,
    COPY,
    MEMORIES,
    NET_MESSAGE,
    OPERAND,
    ROW,
    STREAM,
    Kind,
)
from collectives.engine.peer import bytes_at

SPARE = 1 << 19
"""Bytes of a long message that are read from a peer's memory and reduced at a time, while they are in the cache."""


class Place(NamedTuple):
    """Place in a memory of a program: the number of the memory, and an offset in bytes."""

    memory: int
    offset: int


NOWHERE = Place(ABSOLUTE, 0)


class MemoryOperand(NamedTuple):
    """`nbytes` of an instruction at the places of the left or only operand, the right one, and the result."""

    nbytes: int
    left: Place = NOWHERE
    right: Place = NOWHERE
    out: Place = NOWHERE


class PeerLink(Protocol):
    """Mailboxes to and from one peer. `link` is its record, `rank` that of the peer in the communicator."""

    link: np.ndarray

    @property
    def rank(self) -> int: ...

    def refuse(self, expected: int | None) -> Exception:
        """Acknowledge an unexpected message, and return the error."""


class NetworkMessage(Protocol):
    """Message over MPI: a send to `peer`, or a receive from it."""

    peer: int
    receives: bool

    def describe(self, record: Any) -> None:
        """Fill the record of the message for the engine."""

    def error(self, result: int, record: Any, nbytes: int) -> Exception:
        """The error by which a start or end of a message of `nbytes` has failed with a result of the engine."""


class Point(NamedTuple):
    """Point of a stream after its first `number` instructions."""

    stream: list[Instruction]
    number: int


@dataclass(eq=False, slots=True)
class Instruction:
    """One instruction of a stream. The fields that its kind does not need keep their defaults."""

    kind: Kind
    operands: Sequence[MemoryOperand] = ()
    link: PeerLink | None = None
    label: int = 0
    """Label of the message beside its flag or in a bounce buffer."""

    address_label: int = 0
    """Label of the message by its address, without the number of addresses. 0 if it may not go by address."""

    part: int = 0
    """Bytes of the parts in which a message travels through bounce buffers. 0: in one."""

    reduction: int = COPY
    mine_first: bool = False
    after: Point | Instruction | None = None
    """Point of another stream that is waited for, or the send whose message the receiver has to read first."""

    message: NetworkMessage | None = None
    call: Callable[[], object] | None = None
    """Function of a CALL. It returns False while it must be called again."""

    @property
    def nbytes(self) -> int:
        return sum(operand.nbytes for operand in self.operands)


def waiting(point: Point) -> Instruction:
    """Instruction that waits until another stream has reached a point."""
    return Instruction(Kind.WAIT_STREAM, after=point)


def calling(function: Callable[[], object]) -> Instruction:
    """Instruction that calls a function, again and again while that returns False."""
    return Instruction(Kind.CALL, call=function)


class OnMemories:
    """Function of a CALL on arrays in the memories of its program, bound anew when their addresses change.

    ``bind(*arrays)`` returns a function without arguments; `ranges` are places and bytes of the arrays of a dtype.
    """

    bases: np.ndarray
    """Addresses of the program's memories. Set by `assemble`."""

    def __init__(
        self,
        bind: Callable[..., Callable[[], object]],
        ranges: Sequence[tuple[Place, int]],
        dtype: np.dtype[Any],
    ) -> None:
        self._bind, self._ranges, self._dtype = bind, ranges, dtype
        self._addresses: list[int] = []
        self._bound: Callable[[], object] | None = None

    def __call__(self) -> object:
        bases = self.bases.tolist()
        addresses = [
            place.offset + (0 if place.memory == ABSOLUTE else bases[place.memory]) for place, _ in self._ranges
        ]
        if self._bound is None or addresses != self._addresses:
            ranges = zip(addresses, (nbytes for _, nbytes in self._ranges))
            self._bound, self._addresses = self._bind(*(bytes_at(*one).view(self._dtype) for one in ranges)), addresses
        return self._bound()


Rounds = list[list[list[Instruction]]]


class Rows(NamedTuple):
    """Arrays of a program, arguments of the `RowProgram` of an engine in this order.

    Attributes
    ----------
    rows, operands, streams : of the dtypes in `instructions`
    rounds : first stream of each round, and the end
    bases : address of each memory, which may change between two runs
    links : records of links to peers
    messages : records of network messages
    spare : memory into which a peer's memory is read before it is reduced
    calls : functions of the CALL rows, in order
    """

    rows: np.ndarray
    operands: np.ndarray
    streams: np.ndarray
    rounds: np.ndarray
    bases: np.ndarray
    links: tuple[np.ndarray, ...]
    messages: np.ndarray
    spare: np.ndarray
    calls: tuple[Callable[[], object], ...]


def new_bases() -> np.ndarray:
    """Addresses of the memories of a new program."""
    return np.zeros(MEMORIES, np.int64)


def flat(rounds: Rounds) -> list[Instruction]:
    """All instructions of a program, in the order of its rows."""
    return [one for streams in rounds for stream in streams for one in stream]


def assemble(rounds: Rounds, bases: np.ndarray, any_length: bool = False) -> Rows:
    """Assemble the rows of a program on memories at these addresses. `any_length`: operands are chunks, not bytes."""
    instructions = flat(rounds)
    for one in instructions:
        if isinstance(one.call, OnMemories):
            one.call.bases = bases  # not a copy: a program that moves changes them in place
    messages = list({id(one.message): one.message for one in instructions if one.message is not None}.values())
    records = np.zeros(len(messages), NET_MESSAGE)
    for message, record in zip(messages, records):
        message.describe(record)
    links = list({id(one.link): one.link for one in instructions if one.link is not None}.values())
    numbers = {id(one): number for several in (links, messages) for number, one in enumerate(several)}
    bounds: list[tuple[int, int, int]] = []
    starts = [0]
    for streams in rounds:
        for stream in streams:
            first = bounds[-1][1] if bounds else 0
            bounds.append((first, first + len(stream), first))
        starts.append(len(bounds))
    numbers |= {id(stream): number for number, stream in enumerate(one for streams in rounds for one in streams)}
    numbers |= {id(one): number for number, one in enumerate(instructions) if one.kind == Kind.SEND}
    reduced = (one.nbytes for one in instructions if one.kind == Kind.RECV and one.reduction != COPY)
    return Rows(
        np.array(list(_rows(instructions, numbers)), ROW),
        np.array([_operand(operand) for one in instructions for operand in one.operands], OPERAND),
        np.array(bounds, STREAM),
        np.array(starts, np.int64),
        bases,
        tuple(link.link for link in links),
        records,
        np.empty(SPARE if any_length else min(SPARE, max(reduced, default=0)), np.uint8),
        tuple(one.call for one in instructions if one.call is not None),
    )


def _operand(operand: MemoryOperand) -> tuple[int, ...]:
    places = operand.left, operand.right, operand.out
    return operand.nbytes, *(place.offset for place in places), *(place.memory for place in places), 0


def _rows(instructions: Sequence[Instruction], numbers: dict[int, int]) -> Iterator[tuple[int, ...]]:
    """Values of the rows, in the order of the fields of `ROW`."""
    first = calls = 0
    for one in instructions:
        link, after, count = numbers.get(id(one.link if one.message is None else one.message), 0), 0, 0
        if one.call is not None:
            link, calls = calls, calls + 1
        if isinstance(one.after, Point):
            after, count = numbers[id(one.after.stream)], one.after.number
        elif one.after is not None:
            after = numbers[id(one.after)]
        last = one.reduction, one.kind, one.mine_first
        yield (
            one.label,
            one.address_label,
            one.nbytes,
            one.part,
            0,
            0,
            first,
            len(one.operands),
            link,
            after,
            count,
            *last,
        )
        first += len(one.operands)
