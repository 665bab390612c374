"""Recognises schedules that are one send, one receive and one copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from collectives.runtime.program import Task
from collectives.schedule.chunks import MemorySpan, joined
from collectives.schedule.steps import Recv, RecvReduce, Send, Side, numbers


class SingleExchange(NamedTuple):
    """One rank's part of a short call with one peer, in runs of elements (first, count); a count of 0 is none.

    Attributes
    ----------
    peer : int
        With whom messages are exchanged.
    out : (int, int)
        What is sent, out of the memory that the call brings.
    into : (int, int)
        Where what comes goes, in the memory that it fills.
    mine : int or None
        The first element of one's own that is combined with it; None if it is only put there.
    side : "left" or "right"
        On which side of one's own what comes stands.
    copy : (int, int, int)
        What is one's own and stays: from where, to where, how many.
    """

    peer: int
    out: tuple[int, int]
    into: tuple[int, int]
    mine: int | None
    side: Side
    copy: tuple[int, int, int]


def as_single_exchange(task: Task) -> SingleExchange | None:
    """The task as a single exchange; None if it is more."""
    rounds = [steps for steps in task.schedule if steps]
    steps = list(chain.from_iterable(rounds))
    sends = [step for step in steps if isinstance(step, Send)]
    comes = [step for step in steps if isinstance(step, (Recv, RecvReduce))]
    if len(rounds) != 1 or len(sends) > 1 or len(comes) > 1 or len(sends) + len(comes) < len(steps):
        return None
    if len({step.peer for step in (*sends, *comes)}) != 1 or not all(step.chunks for step in (*sends, *comes)):
        return None
    written = {chunk for step in comes for chunk in numbers(step.chunks)}
    stays = [chunk for chunk in sorted(task.target) if chunk in task.source and chunk not in written]
    moves = [chunk for chunk in stays if task.source[chunk] != task.target[chunk]]
    summed = [step for step in comes if isinstance(step, RecvReduce)]
    out = _run(task.source, _chunks(sends))
    into = _run(task.target, _chunks(comes))
    mine = _run(task.source, _chunks(summed))
    origin, goal = _run(task.source, moves), _run(task.target, moves)
    if out is None or into is None or mine is None or origin is None or goal is None:
        return None
    peer = next(step.peer for step in (*sends, *comes))
    first = mine[0] if summed else None
    side: Side = summed[0].side if summed else "right"
    return SingleExchange(peer, out, into, first, side, (origin[0], goal[0], origin[1]))


def _chunks(steps: Iterable[Send | Recv | RecvReduce]) -> list[int]:
    return [chunk for step in steps for chunk in numbers(step.chunks)]


def _run(places: Mapping[int, MemorySpan], chunks: Iterable[int]) -> tuple[int, int] | None:
    """The chunks as one run (first element, count); None if they are several, or not all there."""
    found = [places.get(chunk) for chunk in chunks]
    whole = joined(place for place in found if place is not None)
    if None in found:
        return None
    if len(whole) > 1:
        return None
    return (whole[0].start, whole[0].stop - whole[0].start) if whole else (0, 0)
