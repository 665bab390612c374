"""Schedules made from schedules: run backwards, in segments, among some ranks only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from collectives.schedule.steps import (
    Chunks,
    Copy,
    Recv,
    RecvReduce,
    Reduce,
    Round,
    Rounds,
    Send,
    Step,
    numbers,
    scattered,
)


def reverse(rounds: Iterable[Round], rank: int, reducing: bool) -> Rounds:
    """Every message flies back: a scatter becomes a gather and, when `reducing`, a broadcast becomes a reduce.

    Where a schedule sends to ranks that stand together on one side of the sender, as all trees here do, the reversed
    one keeps rank order: what comes back from a higher rank joins on the right.
    """
    for steps in reversed(list(rounds)):
        backwards: Round = []
        for step in reversed(steps):
            match step:
                case Recv(peer, chunks):
                    backwards.append(Send(peer, chunks))
                case Send(peer, chunks) if reducing:
                    backwards.append(RecvReduce(peer, chunks, "right" if peer > rank else "left"))
                case Send(peer, chunks):
                    backwards.append(Recv(peer, chunks))
                case _:
                    raise ValueError(f"{step} cannot run backwards: only messages that move data can")
        yield backwards


def _renamed(step: Step, peer: Callable[[int], int], chunks: Callable[[Chunks], Chunks]) -> Step:
    match step:
        case Send(to, what):
            return Send(peer(to), chunks(what))
        case Recv(source, what):
            return Recv(peer(source), chunks(what))
        case RecvReduce(source, what, side):
            return RecvReduce(peer(source), chunks(what), side)
        case Reduce(what, target, side):
            return Reduce(chunks(what), chunks(target), side)
        case Copy(what, target):
            return Copy(chunks(what), chunks(target))
    raise TypeError(f"{step!r} is no step")


def on(
    ranks: Sequence[int] | Callable[[int], int],
    rounds: Iterable[Round],
    chunks: Callable[[Chunks], Chunks] = lambda chunks: chunks,
) -> Rounds:
    """The schedule played by `ranks`: peer i is ``ranks[i]`` or ``ranks(i)``, its chunks what `chunks` gives."""
    peer = ranks if callable(ranks) else ranks.__getitem__
    for steps in rounds:
        yield [_renamed(step, peer, chunks) for step in steps]


def pipelined(
    rounds: Iterable[Round], segments: int, chunks: Callable[[Chunks, int], Chunks], period: int = 1
) -> Rounds:
    """The schedule once per segment, each a `period` of rounds behind the one before, so that they overlap.

    Rounds must be aligned over the ranks: a rank that waits has empty rounds. `chunks(chunks, segment)` names the
    part of the chunks that lies in the segment.
    """
    once = list(rounds)
    for time in range(len(once) + (segments - 1) * period):
        yield [
            _renamed(step, lambda peer: peer, lambda what, segment=segment: chunks(what, segment))  # type: ignore[misc]
            for segment in range(segments)
            if 0 <= time - segment * period < len(once)
            for step in once[time - segment * period]
        ]


def segmented(rounds: Iterable[Round], segments: int, count: int, vector: bool) -> Rounds:
    """The schedule pipelined over `segments` of its data, which has `count` chunks uncut.

    A vector is cut first, so that a segment is a run of memory: chunk c of segment s is ``s * count + c``. Blocks
    are cut one by one, because each has its own place: chunk c becomes ``c * segments + s``.
    """

    def of_vector(chunks: Chunks, segment: int) -> Chunks:
        return tuple(
            range(
                lap * segments * count + segment * count + start,
                lap * segments * count + segment * count + stop,
            )
            for part in chunks
            for lap, start, stop in _laps(part, count)
        )

    def of_blocks(chunks: Chunks, segment: int) -> Chunks:
        return scattered(chunk * segments + segment for chunk in numbers(chunks))

    return pipelined(rounds, segments, of_vector if vector else of_blocks)


def _laps(part: range, count: int) -> list[tuple[int, int, int]]:
    """A range of chunks by copies of the vector: (copy, first chunk in it, end in it); copy 0 is the data itself."""
    laps = []
    start = part.start
    while start < part.stop:
        lap, first = divmod(start, count)
        stop = min(part.stop, (lap + 1) * count)
        laps.append((lap, first, first + stop - start))
        start = stop
    return laps
