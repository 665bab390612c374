"""Schedule language: five kinds of steps on numbered chunks, grouped in rounds.

An algorithm is a generator of rounds. A round is a list of steps. The messages of a round are concurrent: every
`Send` reads and every receive completes before any local work. Then `RecvReduce`, `Reduce` and `Copy` take effect in
the order in which they are listed. A round ends for a rank when its own messages are complete. The ranks are not
synchronised. Messages between two ranks match in the order in which they were sent (MPI's rule).

A chunk is a number, never bytes: chunk ``c`` of ``C`` is the c-th part of the vector. Numbers from ``C`` on are
scratch: chunk ``k * C + c`` lies in the k-th spare copy of the vector and is as long as chunk ``c``.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

Chunks: TypeAlias = tuple[range, ...]
"""Chunk numbers in the order of transfer: a few ranges of consecutive ones."""

Side: TypeAlias = Literal["left", "right"]


class Send(NamedTuple):
    """Send the chunks to `peer` as one message."""

    peer: int
    chunks: Chunks


class Recv(NamedTuple):
    """Receive one message from `peer` into the chunks."""

    peer: int
    chunks: Chunks


class RecvReduce(NamedTuple):
    """Receive one message from `peer` and combine it into the chunks.

    `side` is the side of the incoming operand: ``"left"`` gives ``incoming op mine``, ``"right"`` gives
    ``mine op incoming``. The two differ only for operations that do not commute.
    """

    peer: int
    chunks: Chunks
    side: Side = "left"


class Reduce(NamedTuple):
    """Combine the chunks `source` into the chunks `target` of the same rank. `source` is the operand on `side`."""

    source: Chunks
    target: Chunks
    side: Side = "left"


class Copy(NamedTuple):
    """Copy the chunks `source` to the chunks `target` of the same rank."""

    source: Chunks
    target: Chunks


Step: TypeAlias = Send | Recv | RecvReduce | Reduce | Copy
Round: TypeAlias = list[Step]
Rounds: TypeAlias = Iterator[Round]
Schedule: TypeAlias = tuple[tuple[Step, ...], ...]
"""The rounds of one rank, as data."""

NOTHING: Chunks = ()
"""No chunks: an empty message, for synchronisation only."""


def one(chunk: int) -> Chunks:
    """Chunks that consist of `chunk` alone."""
    return (range(chunk, chunk + 1),)


def span(start: int, stop: int) -> Chunks:
    """Chunks `start`, ..., `stop` - 1."""
    return (range(start, stop),) if stop > start else NOTHING


def cyclic(start: int, count: int, size: int) -> Chunks:
    """`count` chunks from `start` on, modulo `size`: at most two ranges."""
    start %= size
    tail = min(count, size - start)
    return span(start, start + tail) + span(0, count - tail)


def scattered(chunks: Iterable[int]) -> Chunks:
    """Chunks with these numbers in this order. Consecutive numbers are merged into ranges."""
    ranges: list[range] = []
    for chunk in chunks:
        if ranges and ranges[-1].stop == chunk:
            ranges[-1] = range(ranges[-1].start, chunk + 1)
        else:
            ranges.append(range(chunk, chunk + 1))
    return tuple(ranges)


numbers: Callable[[Chunks], Iterator[int]] = chain.from_iterable
"""The chunk numbers one by one."""


def freeze(rounds: Iterable[Iterable[Step]]) -> Schedule:
    """Convert the rounds of a generator to a tuple of tuples."""
    return tuple(map(tuple, rounds))


def show(chunks: Chunks) -> str:
    """Format chunks: ``3``, ``0-4``, ``6-7,0-1``, ``nothing``."""
    parts = (str(part.start) if len(part) == 1 else f"{part.start}-{part.stop - 1}" for part in chunks)
    return ",".join(parts) or "nothing"
