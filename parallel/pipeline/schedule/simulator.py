"""All stages of a plan played in one process: the proof that it ends, and the clock.

A computation waits for the stage's previous one and for the message that it needs. A message flies when its sender has
started it and its receiver has posted it, whichever is later: so what ends here ends in any MPI, however little it
buffers. Times are numbers of any kind; with whole numbers or fractions, all that comes out is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from parallel.pipeline.schedule import checks as faults
from parallel.pipeline.schedule.actions import RECEIVES, SENDS, Action, Kind, halves
from parallel.pipeline.schedule.numeric import Number, PerPart, spread
from parallel.pipeline.schedule.lowering import received
from parallel.pipeline.schedule.stage_placement import Place
from parallel.pipeline.schedule.pipeline_plan import Plan


class PlanError(ValueError):
    """A plan that cannot be carried out: what is wrong with it, and where every stage stops."""


@dataclass(frozen=True)
class Times:
    """How long things take, in any unit.

    Attributes
    ----------
    forward, backward, weights : number, or one for every part
        Of F, B and W; BW takes as long as B and W.
    message : number, or one for every part
        From one stage to another: of the activations that a part makes, and of their gradient.
    update : number, or one for every part
        Of U.
    """

    forward: PerPart = 1
    backward: PerPart = 1
    weights: PerPart = 1
    message: PerPart = 0
    update: PerPart = 0

    def by_kind(self, parts: int) -> dict[str, list[Number]]:
        """For every kind of computation how long it takes, by part."""
        F, B, W, U = (spread(each, parts) for each in (self.forward, self.backward, self.weights, self.update))
        return {"F": F, "B": B, "W": W, "BW": [b + w for b, w in zip(B, W)], "U": U}


class Event(NamedTuple):
    """A computation, or a message (by its send), from when to when."""

    action: Action
    start: Number
    end: Number


@dataclass(frozen=True)
class Timeline:
    """What happens when.

    Attributes
    ----------
    plan : Plan
    computed : tuple of tuples of Event
        By stage: its computations in order.
    messages : tuple of Event
        All messages, by their sends.
    """

    plan: Plan
    computed: tuple[tuple[Event, ...], ...]
    messages: tuple[Event, ...]

    @cached_property
    def makespan(self) -> Number:
        """When the last computation is over; the first begins at 0."""
        return max((line[-1].end for line in self.computed if line), default=0)

    @cached_property
    def busy(self) -> tuple[Number, ...]:
        """By stage: how long it computes."""
        return tuple(sum(event.end - event.start for event in line) for line in self.computed)

    @cached_property
    def idle(self) -> tuple[Number, ...]:
        """By stage: how long it does not, from 0 to the end of all."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def bubble(self) -> Number:
        """The idle share of all stages' time."""
        whole = self.makespan * len(self.computed)
        return sum(self.idle) / (whole if isinstance(whole, float) else Fraction(whole)) if whole else 0

    @cached_property
    def period(self) -> Number:
        """The longest time from a stage's first computation to its last.

        Where steps follow one another and nobody waits for all between them, a step costs as much.
        """
        return max((line[-1].end - line[0].start for line in self.computed if line), default=0)


def simulate(plan: Plan, times: Times | None = None) -> Timeline:
    """Play all stages.

    Parameters
    ----------
    plan : Plan
        With messages, as `lowering.lower` makes it.
    times : Times, optional
        One unit for each of F, B and W, and nothing for messages, if not given.

    Raises
    ------
    PlanError
        If stages wait for each other for ever, or an action is missing, there twice or out of place, or messages
        overtake each other, or weights are used that there are not yet. Where every stage stops is in the message.
    """
    found = [*faults.out_of_place(plan)]
    if found:
        raise PlanError(f"{plan.name}: {_some(found)}")
    play = _Play(plan, times or Times())
    play.run()
    found = ["deadlock, the stages wait for each other"] if any(play.waits) else []
    found += [*faults.missing(plan), *play.left_over(), *faults.overtaking(plan), *faults.too_new(plan)]
    if found:
        raise PlanError(f"{plan.name}: {_some(found)}\n{play.grid()}")
    return Timeline(plan, tuple(map(tuple, play.computed)), tuple(play.messages))


class _Play:
    """One run of the clock, as far as it gets."""

    def __init__(self, plan: Plan, times: Times):
        self._plan = plan
        self._flights = spread(times.message, plan.placement.parts)
        self._times = times.by_kind(plan.placement.parts)
        self._clock: list[Number] = [0] * len(plan.actions)
        self._at = [0] * len(plan.actions)
        self._facts: dict[Action, Number] = {}
        """When it was done: F, B, W, and a receive when the message has come."""
        self._posted: dict[Action, Number] = {}
        self._started: dict[Action, tuple[Action, Number]] = {}
        """By the receive: its send."""
        self.waits: list[Action | None] = [None] * len(plan.actions)
        """What a stage waits for."""
        self.computed: list[list[Event]] = [[] for _ in plan.actions]
        self.messages: list[Event] = []

    def run(self) -> None:
        """Go on until nobody can."""
        ready = deque(range(len(self._plan.actions)))
        waiting: dict[Action, int] = {}
        while ready:
            stage = ready.popleft()
            self.waits[stage] = None
            line = self._plan.actions[stage]
            while self._at[stage] < len(line):
                action = line[self._at[stage]]
                needs = self._needs(action)
                late = next((need for need in needs if need not in self._facts), None)
                if late is not None:
                    self.waits[stage] = late
                    waiting[late] = stage
                    break
                arrived = self._do(action, needs)
                if arrived in waiting:
                    ready.append(waiting.pop(arrived))
                self._at[stage] += 1

    def _needs(self, action: Action) -> list[Action]:
        """What must have been done, or have come, before."""
        match action.kind:
            case "SF":
                return [action._replace(kind="F")]
            case "SB" | "W":
                return [action._replace(kind="B")]
            case "F" | "B" | "BW":
                way: Kind = "F" if action.kind == "F" else "B"
                mine = [] if way == "F" else [action._replace(kind="F")]
                source = self._plan.source(action)
                if source is not None and source.stage == action.stage:
                    return [*mine, action._replace(kind=way, chunk=source.chunk)]
                return [*mine, *received(action, self._plan)]
        return []

    def _do(self, action: Action, needs: list[Action]) -> Action | None:
        """Take the step; the receive whose message it has let fly."""
        stage, now = action.stage, self._clock[action.stage]
        if action.kind in RECEIVES:
            self._posted[action] = now
            return self._fly(action)
        if action.kind in SENDS:
            peer = self._plan.peer(action)
            receive = Action(peer.stage, "RF" if action.kind == "SF" else "RB", action.microbatch, peer.chunk)
            self._started[receive] = action, now
            return self._fly(receive)
        part = self._plan.placement.part[Place(stage, action.chunk)]
        start = max([now, *(self._facts[need] for need in needs)])
        end = self._clock[stage] = start + self._times[action.kind][part]
        self.computed[stage].append(Event(action, start, end))
        self._facts |= dict.fromkeys(halves(action), end)
        return None

    def _fly(self, receive: Action) -> Action | None:
        if receive not in self._posted or receive not in self._started:
            return None
        send, started = self._started[receive]
        maker = send if send.kind == "SF" else receive  # of the activations, whose gradient is as long
        flight = self._flights[self._plan.placement.part[Place(maker.stage, maker.chunk)]]
        start = max(started, self._posted[receive])
        self._facts[receive] = start + flight
        self.messages.append(Event(send, start, start + flight))
        return receive

    def left_over(self) -> Iterator[str]:
        """Messages that only one side knows of."""
        yield from (
            f"{send} is never received" for receive, (send, _) in self._started.items() if receive not in self._posted
        )
        yield from (f"nothing is sent for {receive}" for receive in self._posted if receive not in self._started)

    def grid(self) -> str:
        """For every stage what it has done last, where it stops and what it waits for."""
        before = [
            [str(action) for action in line[max(0, at - 4) : at]] for line, at in zip(self._plan.actions, self._at)
        ]
        after = [[str(action) for action in line[at : at + 3]] for line, at in zip(self._plan.actions, self._at)]
        width = max(len(text) for line in [*before, *after, ["-"]] for text in line)
        rows = []
        for stage, (line, at, wait) in enumerate(zip(self._plan.actions, self._at, self.waits)):
            past = " ".join(text.rjust(width) for text in ["", "", "", "", *before[stage]][-4:])
            future = " ".join(text.ljust(width) for text in [*after[stage], "", "", ""][:3])
            reason = f"waits for {_tell(wait)}" if wait else "has ended"
            rows.append(f"stage {stage:>2} {at:>4} of {len(line):>4} done: {past} > {future}  {reason}".rstrip())
        return "\n".join(rows)


def _tell(wait: Action) -> str:
    return f"the message of {wait}" if wait.kind in RECEIVES else str(wait)


def _some(faults: Sequence[str], most: int = 4) -> str:
    more = f"; and {len(faults) - most} more faults" if len(faults) > most else ""
    return "; ".join(faults[:most]) + more
