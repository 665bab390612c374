"""Recognises schedules that are one send, one receive and one copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from collectives.runtime.program import Task
from collectives.schedule.chunks import MemorySpan, joined
from collectives.schedule.steps import Recv, RecvReduce, Send, Side, numbers


class SingleExchange(NamedTuple):
    """One rank's part of a call that exchanges messages with one peer; runs are (first element, count).

    Attributes
    ----------
    out, into
        Run of the input that is sent, and of the result that is received; a count of 0 is none.
    mine, side
        First element of the own operand, and the side of it on which the received one stands; None without reduction.
    copy
        Source, destination and count of the own elements that are copied.
    """

    peer: int
    out: tuple[int, int]
    into: tuple[int, int]
    mine: int | None
    side: Side
    copy: tuple[int, int, int]


def as_single_exchange(task: Task) -> SingleExchange | None:
    """The task as a single exchange; None if it is not one."""
    rounds = [steps for steps in task.schedule if steps]
    steps = list(chain.from_iterable(rounds))
    sends = [step for step in steps if isinstance(step, Send)]
    receives = [step for step in steps if isinstance(step, (Recv, RecvReduce))]
    if len(rounds) != 1 or len(sends) > 1 or len(receives) > 1 or len(sends) + len(receives) < len(steps):
        return None
    if len({step.peer for step in (*sends, *receives)}) != 1 or not all(step.chunks for step in (*sends, *receives)):
        return None
    written = {chunk for step in receives for chunk in numbers(step.chunks)}
    unchanged = [chunk for chunk in sorted(task.target) if chunk in task.source and chunk not in written]
    copied = [chunk for chunk in unchanged if task.source[chunk] != task.target[chunk]]
    summed = [step for step in receives if isinstance(step, RecvReduce)]
    out = _run(task.source, _chunks(sends))
    into = _run(task.target, _chunks(receives))
    mine = _run(task.source, _chunks(summed))
    origin, goal = _run(task.source, copied), _run(task.target, copied)
    if out is None or into is None or mine is None or origin is None or goal is None:
        return None
    peer = next(step.peer for step in (*sends, *receives))
    first = mine[0] if summed else None
    side: Side = summed[0].side if summed else "right"
    return SingleExchange(peer, out, into, first, side, (origin[0], goal[0], origin[1]))


def _chunks(steps: Iterable[Send | Recv | RecvReduce]) -> list[int]:
    return [chunk for step in steps for chunk in numbers(step.chunks)]


def _run(places: Mapping[int, MemorySpan], chunks: Iterable[int]) -> tuple[int, int] | None:
    """The chunks as one run (first element, count); None if there are several runs, or chunks are missing."""
    found = [places.get(chunk) for chunk in chunks]
    whole = joined(place for place in found if place is not None)
    if None in found or len(whole) > 1:
        return None
    return (whole[0].start, whole[0].stop - whole[0].start) if whole else (0, 0)
