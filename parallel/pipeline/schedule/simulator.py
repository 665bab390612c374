"""Simulation of a plan in one process: proof of termination, and timing.

A computation starts after the previous one of its stage and after the message that it needs, a pair of computations
after the messages of both, an update after the backwards of all replicas of its part. A message starts when its send
is started and its receive is posted, so a plan that terminates here terminates under any MPI, without buffering.
Times may be any numbers; with integers or fractions all results are exact.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from parallel.pipeline.schedule import checks
from parallel.pipeline.schedule.actions import RECEIVES, SENDS, Action, Kind, gradients_by_update, halves
from parallel.pipeline.schedule.lowering import received
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan
from parallel.pipeline.schedule.stage_placement import Number, PerPart, spread


class PlanError(ValueError):
    """Invalid plan. The message lists up to four faults and, if it could be simulated, the position of every stage."""


@dataclass(frozen=True)
class ActionTimes:
    """Durations of F, B, W and messages in any unit, one number or one per part of the model. BW takes B + W.

    `message` is the time of a message with a part's activations, or their gradient. A pair takes the time of both
    passes, less the fraction `overlap` of the shorter one.
    """

    forward: PerPart = 1
    backward: PerPart = 1
    weights: PerPart = 1
    message: PerPart = 0
    overlap: Number = 0

    def by_kind(self, parts: int) -> dict[str, list[Number]]:
        F, B, W = (spread(each, parts) for each in (self.forward, self.backward, self.weights))
        return {"F": F, "B": B, "W": W, "BW": [b + w for b, w in zip(B, W)], "U": [0] * parts}


class PipelineEvent(NamedTuple):
    """Action of a plan with its start and end, simulated or measured."""

    action: Action
    start: Number
    end: Number


@dataclass(frozen=True)
class Timeline:
    """Simulated times of a plan: computations of each stage in order, and messages, identified by their sends."""

    plan: PipelinePlan
    computed: tuple[tuple[PipelineEvent, ...], ...]
    messages: tuple[PipelineEvent, ...]

    @cached_property
    def makespan(self) -> Number:
        """End of the last computation of all stages. The first one starts at 0."""
        return max((line[-1].end for line in self.computed if line), default=0)

    @cached_property
    def busy(self) -> tuple[Number, ...]:
        return tuple(sum(event.end - event.start for event in line) for line in self.computed)

    @cached_property
    def idle(self) -> tuple[Number, ...]:
        """Idle time of each stage, from 0 to the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def bubble(self) -> Number:
        """Idle fraction, from 0 to 1, of the total time of all stages."""
        whole = self.makespan * len(self.computed)
        return sum(self.idle) / (whole if isinstance(whole, float) else Fraction(whole)) if whole else 0

    @cached_property
    def period(self) -> Number:
        """Longest time from a stage's first to its last computation: step time if steps follow without a flush."""
        return max((line[-1].end - line[0].start for line in self.computed if line), default=0)


def simulate(plan: PipelinePlan, times: ActionTimes | None = None) -> Timeline:
    """Simulate all stages of a plan with messages. By default F, B and W take 1 unit each, messages 0.

    Raises
    ------
    PlanError
        If the stages deadlock, an action is missing, duplicated or misplaced, messages overtake each other, or weights
        are used before they exist. The message shows the position of every stage.
    """
    if found := [*checks.misplaced_actions(plan)]:
        raise PlanError(f"{plan.name}: {_summary(found)}")
    simulation = _Simulation(plan, times or ActionTimes())
    simulation.run()
    found = ["deadlock: the stages wait for each other"] if any(simulation.waits) else []
    found += [
        *checks.missing_actions(plan),
        *simulation.left_over(),
        *checks.overtaking_messages(plan),
        *checks.invalid_versions(plan),
    ]
    if found:
        raise PlanError(f"{plan.name}: {_summary(found)}\n{simulation.grid()}")
    return Timeline(plan, tuple(map(tuple, simulation.computed)), tuple(simulation.messages))


class _Simulation:
    def __init__(self, plan: PipelinePlan, times: ActionTimes):
        self._plan = plan
        self._transfer_times = spread(times.message, plan.placement.parts)
        self._times, self._overlap = times.by_kind(plan.placement.parts), times.overlap
        self._hidden: dict[Action, Number] = {}  # time of the second action of a pair during the first
        self._clock: list[Number] = [0] * len(plan.actions)
        self._at = [0] * len(plan.actions)
        # Completion times: of F, B and W, and of a receive when its message has arrived.
        self._finished: dict[Action, Number] = {}
        self._posted: dict[Action, Number] = {}
        self._started: dict[Action, tuple[Action, Number]] = {}  # by receive: its send, and when
        self.waits: list[Action | None] = [None] * len(plan.actions)  # awaited action of each stage
        self._gradients = _gradients_of_updates(plan)
        self.computed: list[list[PipelineEvent]] = [[] for _ in plan.actions]
        self.messages: list[PipelineEvent] = []

    def run(self) -> None:
        ready = deque(range(len(self._plan.actions)))
        waiting: dict[Action, list[int]] = defaultdict(list)
        while ready:
            stage = ready.popleft()
            self.waits[stage] = None
            line = self._plan.actions[stage]
            while self._at[stage] < len(line):
                action = line[self._at[stage]]
                needs = self._needs(action)
                late = next((need for need in needs if need not in self._finished), None)
                if late is not None:
                    self.waits[stage] = late
                    waiting[late].append(stage)
                    break
                for finished in self._do(action, needs):
                    ready.extend(waiting.pop(finished, ()))
                self._at[stage] += 1

    def _needs(self, action: Action) -> list[Action]:
        """Actions that must be complete before this one starts, or its pair. A receive when its message has arrived."""
        partner = self._plan.partners.get(action)
        return self._inputs(action) + ([] if partner is None else self._inputs(partner))

    def _inputs(self, action: Action) -> list[Action]:
        match action.kind:
            case "SF":
                return [action._replace(kind="F")]
            case "SB" | "W":
                return [action._replace(kind="B")]
            case "U":
                return self._gradients[self._plan.placement.part[action.place], action.microbatch]
            case "F" | "B" | "BW":
                direction: Kind = "F" if action.kind == "F" else "B"
                own = [] if direction == "F" else [action._replace(kind="F")]
                source = self._plan.source(action)
                if source is not None and source.stage == action.stage:
                    return [*own, action._replace(kind=direction, chunk=source.chunk)]
                return [*own, *received(action, self._plan)]
        return []  # a receive starts without its message

    def _do(self, action: Action, needs: list[Action]) -> Sequence[Action]:
        """Execute an action in simulated time. Returns what it completes: its halves, or a receive, if any."""
        stage, now = action.stage, self._clock[action.stage]
        if action.kind in RECEIVES:
            self._posted[action] = now
            return self._start_transfer(action)
        if action.kind in SENDS:
            peer = self._plan.peer(action)
            receive = Action(peer.stage, "RF" if action.kind == "SF" else "RB", action.microbatch, peer.chunk)
            self._started[receive] = action, now
            return self._start_transfer(receive)
        start = max([now, *(self._finished[need] for need in needs)])
        end = self._clock[stage] = start + self._time_of(action) - self._hidden.pop(action, 0)
        if (partner := self._plan.partners.get(action)) is not None:
            self._hidden[partner] = self._overlap * min(self._time_of(action), self._time_of(partner))
        self.computed[stage].append(PipelineEvent(action, start, end))
        self._finished |= dict.fromkeys(halves(action), end)
        return halves(action)

    def _time_of(self, action: Action) -> Number:
        return self._times[action.kind][self._plan.placement.part[action.place]]

    def _start_transfer(self, receive: Action) -> Sequence[Action]:
        if receive not in self._posted or receive not in self._started:
            return ()
        send, started = self._started[receive]
        producer = send if send.kind == "SF" else receive  # of the activations: their gradient has the same size
        duration = self._transfer_times[self._plan.placement.part[producer.place]]
        start = max(started, self._posted[receive])
        self._finished[receive] = start + duration
        self.messages.append(PipelineEvent(send, start, start + duration))
        return (receive,)

    def left_over(self) -> Iterator[str]:
        """Yield a text for every send without a receive, and every receive without a send."""
        for receive, (send, _) in self._started.items():
            if receive not in self._posted:
                yield f"{send} is never received"
        yield from (f"nothing is sent for {receive}" for receive in self._posted if receive not in self._started)

    def grid(self) -> str:
        """Table of every stage's last actions, position and awaited action."""
        shown = [
            ["", "", "", "", *map(str, line), "", "", ""][at : at + 7] for line, at in zip(self._plan.actions, self._at)
        ]
        width = max(1, *(len(text) for texts in shown for text in texts))
        rows = []
        for stage, (texts, at, wait) in enumerate(zip(shown, self._at, self.waits)):
            past = " ".join(text.rjust(width) for text in texts[:4])
            future = " ".join(text.ljust(width) for text in texts[4:])
            message = "the message of " if wait and wait.kind in RECEIVES else ""
            reason = f"waits for {message}{wait}" if wait else "has ended"
            done = f"{at:>4} of {len(self._plan.actions[stage]):>4} done"
            rows.append(f"stage {stage:>2} {done}: {past} > {future}  {reason}".rstrip())
        return "\n".join(rows)


def _gradients_of_updates(plan: PipelinePlan) -> dict[tuple[int, int], list[Action]]:
    """W of the micro-batches of each update, by part and number of the update, on all replicas of the part."""
    found: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for line in plan.actions if plan.versions is not None else ():
        for number, gradients in gradients_by_update(line).items():
            for action in gradients:
                found[plan.placement.part[action.place], number].append(action._replace(kind="W"))
    return found


def _summary(faults: Sequence[str]) -> str:
    more = [f"and {len(faults) - 4} more faults"] if len(faults) > 4 else []
    return "; ".join([*faults[:4], *more])
