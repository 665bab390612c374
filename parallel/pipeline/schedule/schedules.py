"""Pipeline schedules: one generator per schedule and one line per schedule in the table `SCHEDULES`.

A schedule is a generator ``(stage, stages, microbatches, ...)`` of the actions of one stage: F and BW, or F, B and W,
and U where stages update without a flush. Messages, times and arrays are added elsewhere: `pipeline_plan.build` makes a
plan, `lowering` adds messages, `simulator` proves and times it. Every schedule works for any number of stages and
micro-batches; formulas that need a minimum of micro-batches state it.

In formulas p is the number of stages, m the number of micro-batches, and t_F, t_B, t_W the times of a stage for F, B
and W of a micro-batch over all its chunks; t_BW = t_B + t_W. "Idle" is a stage's idle time between the first and the
last computation of all stages; "idle between steps" is the idle time per step where the next step may begin without a
flush. A micro-batch's activations are alive from the begin of its F to the end of its W.
"""

import inspect
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import accumulate, pairwise
from typing import NamedTuple

from parallel.pipeline.schedule.actions import BW, Action, B, F, U, W, halves
from parallel.pipeline.schedule.stage_placement import StagePlacement, loop, opposed, vee

Actions = Iterator[Action]


def alternate(ahead: int, forwards: Iterable[Action], backwards: Iterable[Action]) -> Actions:
    """Yield `ahead` forwards, then a forward and a backward in turn, then the remaining backwards."""
    forwards, backwards = list(forwards), iter(backwards)
    yield from forwards[:ahead]
    for forward in forwards[ahead:]:
        yield forward
        yield next(backwards)
    yield from backwards


def take_turns(count: int, *queues: Iterator[Action]) -> Actions:
    """Yield one action from each queue in turn, `count` times. Empty queues are skipped."""
    for _ in range(count):
        for queue in queues:
            yield from [action for action in [next(queue, None)] if action is not None]


# ------------------------------------------------------------------------------------------ with a flush


def naive(stage: int, stages: int, microbatches: int) -> Actions:
    """Reference schedule: one micro-batch at a time through all stages and back.

    Idle for (p-1)/p of a step; one micro-batch alive.
    """
    for m in range(microbatches):
        yield F(stage, m)
        yield BW(stage, m)


def gpipe(stage: int, stages: int, microbatches: int) -> Actions:
    """GPipe: all forwards, then all backwards.

    Idle for (p-1)(t_F + t_BW), a share of (p-1)/(m+p-1); m micro-batches alive. Backwards run in the order of the
    forwards (reversed in the paper, at the same cost).

    Huang et al., "GPipe", NeurIPS 2019, section 2.3.
    """
    yield from (F(stage, m) for m in range(microbatches))
    yield from (BW(stage, m) for m in range(microbatches))


class Turns(NamedTuple):
    """Round robin of a replica: its micro-batches `first`, `first` + `every`, .... Its forwards ahead of backwards."""

    first: int
    every: int
    ahead: int


def round_robin(stage: int, stages: int, ranks: Sequence[int] | None) -> Turns:
    """Turns of a stage that is one of ``ranks[k]`` replicas of its part k (default: one of each).

    A replica runs as many forwards ahead as keep the replicas of later parts busy: their number, divided among its own.

    >>> [round_robin(stage, 4, (2, 1, 1)) for stage in range(3)]
    [Turns(first=0, every=2, ahead=1), Turns(first=1, every=2, ahead=1), Turns(first=0, every=1, ahead=1)]
    """
    ends = list(accumulate(ranks or (1,) * stages))
    part = bisect_right(ends, stage)
    every = ends[part] - (ends[part - 1] if part else 0)
    return Turns(stage - (ends[part] - every), every, -(-(stages - ends[part]) // every))


def one_f_one_b(stage: int, stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Actions:
    """1F1B: ``stages - 1 - stage`` warm-up forwards, then a forward and a backward in turn, then remaining backwards.

    Idle as long as GPipe, with at most p - stage micro-batches alive. With `ranks` it is 1F1B-RR: ``ranks[k]`` stages
    have part k of the model and take its micro-batches in turn (`round_robin`).

    Harlap et al., "PipeDream", 2018, section 3.2 (1F1B-RR); Narayanan et al., "PipeDream", SOSP 2019, section 3.2; with
    a flush: Narayanan et al., "Efficient large-scale language model training on GPU clusters", SC 2021, section 2.2.
    """
    turns = round_robin(stage, stages, ranks)
    own = range(turns.first, microbatches, turns.every)
    ahead = min(turns.ahead, len(own))
    warm_up = [F(stage, m) for m in own[:ahead]]
    steady = [each for m, back in zip(own[ahead:], own) for each in (F(stage, m), BW(stage, back))]
    cool_down = [BW(stage, m) for m in own[len(own) - ahead :]]
    yield from (*warm_up, *steady, *cool_down)


def interleaved(stage: int, stages: int, microbatches: int, virtual: int) -> Actions:
    """1F1B with v = `virtual` chunks per stage: groups of about `stages` micro-batches pass through all chunks in turn.

    Idle for (p-1)(t_F + t_BW)/v if m >= p. Keeps 2(p-1 - stage) + (v-1)g + 1 micro-batch chunks alive (if there are as
    many), g being the group length; sends v times as much. The paper requires p to divide m, so that g = p; here groups
    are as equal as possible, and g <= 2p - 1.

    Narayanan et al., "Efficient large-scale language model training on GPU clusters", SC 2021, section 2.2.
    """
    groups = max(1, microbatches // stages)
    cuts = [-(-microbatches * group // groups) for group in range(groups + 1)]

    def order(kind: Callable[..., Action], chunks: range) -> Actions:
        for start, stop in pairwise(cuts):
            for chunk in chunks:
                yield from (kind(stage, m, chunk) for m in range(start, stop))

    ahead = 2 * (stages - 1 - stage) + (virtual - 1) * cuts[1] if virtual > 1 else stages - 1 - stage
    yield from alternate(ahead, order(F, range(virtual)), order(BW, range(virtual)[::-1]))


# ------------------------------------------------------------------------------------------ without a flush


def with_updates(line: Iterable[Action], stage: int, microbatches: int, each: int) -> Actions:
    """Add an update for every `each` of all `microbatches`, after the last backward of this stage among them.

    A stage without a backward among the last ones takes part in their update too.
    """
    line = list(line)
    own = [action.microbatch for action in line if action.kind == "BW"]
    if own and own[0] >= each:
        raise ValueError(f"ranks: expected at most {each} of a part, as many as an update has micro-batches")
    last = -(-microbatches // each)
    update_after = dict(zip(own, [following // each for following in own[1:]] + [last]))
    done = 0
    for action in line:
        yield action
        if action.kind == "BW":
            yield from (U(stage, number) for number in range(done, update_after[action.microbatch]))
            done = update_after[action.microbatch]
    yield from (U(stage, number) for number in range(done, last))  # collective over replicas


def pipedream(stage: int, stages: int, microbatches: int, steps: int, ranks: Sequence[int] | None = None) -> Actions:
    """PipeDream: 1F1B without a flush, an update after every backward. A backward uses the weights of its forward.

    Idle only while the pipeline fills and drains. A stage keeps p - stage versions of its weights. With `ranks`
    (`one_f_one_b`) all parts update after as many micro-batches as the most replicated part has ranks.

    Narayanan et al., "PipeDream", SOSP 2019, section 3.3 ("weight stashing").
    """
    line = one_f_one_b(stage, stages, microbatches * steps, ranks)
    yield from with_updates(line, stage, microbatches * steps, max(ranks or (1,)))


def version_of_pipedream(
    stage: int, stages: int, microbatch: int, microbatches: int, ranks: Sequence[int] | None = None
) -> int:
    """Number of updates in a micro-batch's weights: all but those of the micro-batches in flight before it."""
    turns = round_robin(stage, stages, ranks)
    return max(0, microbatch - turns.ahead * turns.every) // max(ranks or (1,))


def pipedream_2bw(
    stage: int, stages: int, microbatches: int, steps: int, ranks: Sequence[int] | None = None
) -> Actions:
    """PipeDream-2BW: 1F1B without a flush, one update per step. A step uses the weights before the last update.

    Two versions of the weights suffice if m >= p-1 (the paper requires p); with fewer micro-batches the weights of a
    step are ceil((p-1)/m) updates old. With `ranks` (`one_f_one_b`) no part has more ranks than micro-batches.

    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1.
    """
    line = one_f_one_b(stage, stages, microbatches * steps, ranks)
    yield from with_updates(line, stage, microbatches * steps, microbatches)


def version_of_pipedream_2bw(
    stage: int, stages: int, microbatch: int, microbatches: int, ranks: Sequence[int] | None = None
) -> int:
    """Number of updates in a micro-batch's weights, on any stage: earlier steps less those that may be in flight."""
    return max(0, microbatch // microbatches - -(-(stages - 1) // microbatches))


# ------------------------------------------------------------------------------------------ with B and W apart


def zb_h1(stage: int, stages: int, microbatches: int) -> Actions:
    """ZB-H1: 1F1B with W delayed by `stage` micro-batches into idle time. Every stage keeps `stages` of them alive.

    Idle for (p-1)(t_F + t_B - t_W) if m >= p and t_W <= min(t_F, t_B): a third of 1F1B's if all are equal.

    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.1.
    """
    yield from _delay_weights(stage, microbatches, ahead=stages - 1 - stage, late=stage)


def zb_h2(stage: int, stages: int, microbatches: int) -> Actions:
    """ZB-H2: ZB-H1 with twice as many warm-up forwards. Every stage keeps 2p - 1 micro-batches alive (p stages).

    Idle between steps for (p-1)(t_F + t_B - 2 t_W) if m >= 2p - 1 and t_W <= min(t_F, t_B): zero if all are equal.

    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.2.
    """
    yield from _delay_weights(stage, microbatches, ahead=2 * (stages - 1 - stage), late=2 * stage)


def _delay_weights(stage: int, microbatches: int, ahead: int, late: int) -> Actions:
    """1F1B with `ahead` warm-up forwards and, after every B, the W of the micro-batch `late` positions before."""
    for action in alternate(ahead, *([kind(stage, m) for m in range(microbatches)] for kind in (F, B))):
        yield action
        if action.kind == "B" and action.microbatch >= late:
            yield W(stage, action.microbatch - late)
    yield from (W(stage, m) for m in range(max(0, microbatches - late), microbatches))


def zb_v(stage: int, stages: int, microbatches: int) -> Actions:
    """ZB-V: parts of the model run down the stages and up again, so the first stage has the loss and starts backwards.

    No idle time between steps if t_F = t_B = t_W and m >= 2p - 1; keeps p micro-batches alive (as 2p halves), as 1F1B's
    first stage does.

    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 6.
    """
    F0, F1, B0, B1, W0, W1 = (
        iter([kind(stage, m, chunk) for m in range(microbatches)]) for kind in (F, B, W) for chunk in (0, 1)
    )
    behind = stages - stage
    yield from take_turns(2 * behind - 1, F0)
    yield from take_turns(stage, F1, F0)
    yield from take_turns(behind, F1, B1, W1)
    yield from take_turns(microbatches - stages, F0, B0, W0, F1, B1, W1)
    yield from take_turns(stage, B0, B1)
    yield from take_turns(behind, B0, W0)
    yield from W1
    yield from W0


# ------------------------------------------------------------------------------------------ from both ends


def dualpipe(stage: int, stages: int, microbatches: int) -> Actions:
    """DualPipe: micro-batches enter at both ends of the pipeline and fill each other's bubbles. Two parts per stage.

    The near chunk serves the micro-batches that enter at the nearer end. Idle for (p/2-1)(t_F + t_B - t_W) if p and m
    are even, m >= 2p and t_W <= t_B <= t_F. Keeps p + 1 micro-batches alive. The paper's table has (p/2-1)(t_F&B + t_BW
    - 3 t_W) with an overlapped forward and backward as one block of t_F&B; here they are two actions.

    DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.2.1, and github.com/deepseek-ai/DualPipe.
    """
    half, outer = (stages + 1) // 2, min(stage, stages - 1 - stage)
    inner = half - 1 - outer
    near = 0 if stage == outer else 1
    (F_near, BW_near), (F_far, BW_far) = (
        [iter([kind(stage, m, chunk) for m in range(chunk, microbatches, 2)]) for kind in (F, BW)]
        for chunk in (near, 1 - near)
    )
    yield from take_turns(2 * inner, F_near)
    yield from take_turns(outer + 1, F_near, F_far)
    for action in take_turns(inner, BW_far, F_far):
        yield from halves(action)
    yield from take_turns((microbatches + 1) // 2 - half - inner, F_near, BW_far, F_far, BW_near)
    yield from take_turns(inner, BW_far, F_far, BW_near)

    delayed: deque[Action] = deque()
    for turn, action in enumerate(take_turns(outer + 1, BW_far, BW_near)):
        first, *rest = [action] if turn <= outer else halves(action)
        yield first
        delayed.extend(rest)  # weights' halves: no stage waits for them
    for action in take_turns(inner, BW_near):
        input_gradient, weights = halves(action)
        if delayed:
            yield delayed.popleft()
        yield input_gradient
        delayed.append(weights)
    yield from delayed


def dualpipe_v(stage: int, stages: int, microbatches: int) -> Actions:
    """DualPipe-V: DualPipe on 2p stages, folded in the middle onto p, so that a part of the model is on one stage only.

    Of two stages with the same parts one serves the even and one the odd micro-batches; merging them lets all
    micro-batches enter at the same end. Idle as DualPipe on 2p stages.

    Qi et al., "DualPipe could be better without the dual", 2025; github.com/deepseek-ai/DualPipe.
    """
    for action in dualpipe(stage, 2 * stages, 2 * microbatches):
        yield action._replace(microbatch=action.microbatch // 2)


# ------------------------------------------------------------------------------------------ the table


def tabled(actions: Sequence[Sequence[Action]]) -> Callable[[int, int, int], Sequence[Action]]:
    """Schedule function for a table of actions (see `actions.from_csv`). Ignores `microbatches`.

    It raises ValueError for other `stages` than the table has.
    """

    def schedule(stage: int, stages: int, microbatches: int) -> Sequence[Action]:
        if stages != len(actions):
            raise ValueError(f"stages: the table has lines of {len(actions)}, found {stages}")
        return actions[stage]

    return schedule


class ScheduleEntry(NamedTuple):
    """Entry of `SCHEDULES`: functions for a schedule's actions, placement of the model's parts, and weight versions.

    Attributes
    ----------
    actions : (stage, stages, microbatches, ...) -> actions of that stage. Has a parameter ``virtual`` if the number of
        chunks is free, ``steps`` if the schedule has no flush, ``ranks`` if parts of the model may have replicas.
    placement : (stages) or (stages, virtual) -> placement
    version : (stage, stages, microbatch, microbatches of a step, ranks) -> number of updates in the weights that this
        micro-batch uses on a stage. None without updates within a plan.
    """

    actions: Callable[..., Iterable[Action]]
    placement: Callable[..., StagePlacement] = loop
    version: Callable[..., int] | None = None

    @property
    def options(self) -> Set[str]:
        return inspect.signature(self.actions).parameters.keys()


SCHEDULES: dict[str, ScheduleEntry] = {
    "naive": ScheduleEntry(naive),
    "gpipe": ScheduleEntry(gpipe),
    "1f1b": ScheduleEntry(one_f_one_b),
    "interleaved": ScheduleEntry(interleaved),
    "pipedream": ScheduleEntry(pipedream, version=version_of_pipedream),
    "pipedream-2bw": ScheduleEntry(pipedream_2bw, version=version_of_pipedream_2bw),
    "zb-h1": ScheduleEntry(zb_h1),
    "zb-h2": ScheduleEntry(zb_h2),
    "zb-v": ScheduleEntry(zb_v, vee),
    "dualpipe": ScheduleEntry(dualpipe, opposed),
    "dualpipe-v": ScheduleEntry(dualpipe_v, vee),
}
