"""Transforms of schedules: reversal, segmentation with pipelining, embedding in a subset of ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

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
)  # fmt: skip


def reverse(rounds: Iterable[Round], rank: int, reducing: bool) -> Rounds:
    """Reverse order and messages of a rank's rounds: scatter to gather or, when `reducing`, broadcast to reduce.

    The result keeps rank order if every subtree is a range of ranks on one side of the sender (`mst` is an example).
    An operand from a higher rank is combined on the right. ValueError for steps other than `Send` and `Recv`.
    """
    for steps in reversed(list(rounds)):
        backwards: Round = []
        # a round's messages are concurrent, but matching between two ranks follows their order
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
    raise TypeError(f"expected a step, found {step!r}")


def on(
    ranks: Sequence[int] | Callable[[int], int],
    rounds: Iterable[Round],
    chunks: Callable[[Chunks], Chunks] = lambda chunks: chunks,
) -> Rounds:
    """Map a schedule to other ranks: peer i becomes ``ranks[i]`` or ``ranks(i)``, and `chunks` maps its chunks."""
    peer = ranks if callable(ranks) else ranks.__getitem__
    for steps in rounds:
        yield [_renamed(step, peer, chunks) for step in steps]


def segmented(rounds: Iterable[Round], segments: int, count: int, vector: bool) -> Rounds:
    """Pipeline a rank's schedule over `segments` of its data, each starting one round after the one before.

    The data has `count` chunks before segmentation. Rounds must be aligned over the ranks: a waiting rank has empty
    rounds.

    Segments of a vector are contiguous in memory: chunk c of segment s is ``s * count + c``. Blocks lie at places of
    their own and are cut one by one: chunk c of segment s is ``c * segments + s``.
    """

    def of_vector(chunks: Chunks, segment: int) -> Chunks:
        laps = [(lap, part) for chunk in chunks for lap, part in _split_by_copy(chunk, count)]
        starts = [(lap * segments + segment) * count for lap, _ in laps]
        return tuple(range(start + part.start, start + part.stop) for start, (_, part) in zip(starts, laps))

    def of_blocks(chunks: Chunks, segment: int) -> Chunks:
        return scattered(chunk * segments + segment for chunk in numbers(chunks))

    once, chunks_of = list(rounds), of_vector if vector else of_blocks  # each segment reads it
    for time in range(len(once) + segments - 1):
        yield [
            _renamed(step, lambda peer: peer, partial(chunks_of, segment=segment))
            for segment in range(segments)
            if 0 <= time - segment < len(once)
            for step in once[time - segment]
        ]


def _split_by_copy(chunks: range, count: int) -> Iterator[tuple[int, range]]:
    """Split a range of chunk numbers by copies of the vector: (copy, range in it). Copy 0 is the data itself."""
    for lap in range(chunks.start // count, -(-chunks.stop // count)):
        first = lap * count
        yield lap, range(max(chunks.start - first, 0), min(chunks.stop - first, count))
