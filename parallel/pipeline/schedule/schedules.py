"""Pipeline schedules: for one stage, what it computes in which order; a function each, and a line in the table.

A schedule is a generator ``(stage, stages, microbatches, ...)`` of actions of that stage: F and BW, or F, B and W, and
U where stages update without waiting for each other. It knows no message, no time and no array. `plan.build` makes it a
plan, `lowering` adds messages, `simulate` proves and times it. All are defined for any number of stages and of
micro-batches, also for fewer micro-batches than stages; where a figure holds for enough of them only, it says so.

In formulas p is the stages, m the micro-batches, and t_F, t_B and t_W the times that a stage takes for F, B and W of a
micro-batch, in all parts of the model that it comes by there; t_BW is t_B + t_W. "Idle" is every stage's time from the
first computation of all stages to the last; "idle between steps" is what is lost per step where a stage may begin the
next one without waiting for the others. Micro-batches are kept from the begin of F to the end of W.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from parallel.pipeline.schedule.actions import BW, Action, B, F, U, W, halves
from parallel.pipeline.schedule.stage_placement import Placement, loop, opposed, vee

Actions = Iterator[Action]


def weave(ahead: int, forwards: Iterable[Action], backwards: Iterable[Action]) -> Actions:
    """First `ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    forwards, backwards = list(forwards), iter(backwards)
    yield from forwards[:ahead]
    for forward in forwards[ahead:]:
        yield forward
        yield next(backwards)
    yield from backwards


def turns(count: int, *queues: Iterator[Action]) -> Actions:
    """So many times the next one of each queue; of one that is empty, nothing."""
    for _ in range(count):
        for queue in queues:
            yield from [action for action in [next(queue, None)] if action is not None]


# ------------------------------------------------------------------------------------------ with a flush


def naive(stage: int, stages: int, microbatches: int) -> Actions:
    """One micro-batch after another goes to the end and back; one stage works at a time. The reference.

    Idle for (p-1)/p of a step; keeps one micro-batch.
    """
    for m in range(microbatches):
        yield F(stage, m)
        yield BW(stage, m)


def gpipe(stage: int, stages: int, microbatches: int) -> Actions:
    """All forwards, then all backwards.

    Idle for (p-1)(t_F + t_BW) of a step, a share of (p-1)/(m+p-1); keeps m micro-batches. Backwards come in the order
    of the forwards, where the paper has them in reverse: it costs the same.

    Huang et al., "GPipe", NeurIPS 2019, section 2.3.
    """
    yield from (F(stage, m) for m in range(microbatches))
    yield from (BW(stage, m) for m in range(microbatches))


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Actions:
    """As many forwards as there are stages behind, then a backward after every forward.

    Idle as long as GPipe, but keeps only p - stage micro-batches.

    Narayanan et al., "PipeDream", SOSP 2019, section 3.2; with a flush: Narayanan et al., "Efficient large-scale
    language model training on GPU clusters", SC 2021, section 2.2.
    """
    yield from weave(stages - 1 - stage, *([kind(stage, m) for m in range(microbatches)] for kind in (F, BW)))


def interleaved(stage: int, stages: int, microbatches: int, virtual: int) -> Actions:
    """1F1B on v small parts of the model per stage: groups of p micro-batches go through all chunks, group by group.

    Idle for (p-1)(t_F + t_BW)/v, a v-th of 1F1B's, from m = p on. Keeps 2(p-1 - stage) + (v-1)g + 1 chunks' worth of
    micro-batches if there are as many, g being the length of a group; sends v times as much. The paper asks that p
    divide m, so that g = p; here groups are as equal as can be, and g is up to 2p - 1.

    Narayanan et al., "Efficient large-scale language model training on GPU clusters", SC 2021, section 2.2.
    """
    groups = max(1, microbatches // stages)
    cuts = [-(-microbatches * group // groups) for group in range(groups + 1)]

    def order(kind: Callable[..., Action], chunks: range) -> Actions:
        for start, stop in pairwise(cuts):
            for chunk in chunks:
                yield from (kind(stage, m, chunk) for m in range(start, stop))

    ahead = 2 * (stages - 1 - stage) + (virtual - 1) * cuts[1] if virtual > 1 else stages - 1 - stage
    yield from weave(ahead, order(F, range(virtual)), order(BW, range(virtual)[::-1]))


# ------------------------------------------------------------------------------------------ without a flush


def pipedream(stage: int, stages: int, microbatches: int, steps: int) -> Actions:
    """1F1B without a flush: every backward is followed by an update, and uses the weights that its forward used.

    Idle only while the pipeline fills and drains. A stage keeps as many versions of its weights as micro-batches,
    p - stage.

    Narayanan et al., "PipeDream", SOSP 2019, section 3.3 ("weight stashing").
    """
    for action in one_f_one_b(stage, stages, microbatches * steps):
        yield action
        if action.kind == "BW":
            yield U(stage, action.microbatch)


def of_pipedream(stage: int, stages: int, microbatch: int, microbatches: int) -> int:
    """All updates but those of the p-1 - stage micro-batches that are still under way."""
    return max(0, microbatch - (stages - 1 - stage))


def pipedream_2bw(stage: int, stages: int, microbatches: int, steps: int) -> Actions:
    """1F1B without a flush, an update after every step's last backward; a step uses the weights before the last update.

    Two versions of the weights will do, from m = p-1 on (the paper asks for p); with fewer micro-batches a step's
    weights are ceil((p-1)/m) updates old.

    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1.
    """
    for action in one_f_one_b(stage, stages, microbatches * steps):
        yield action
        step, place = divmod(action.microbatch, microbatches)
        if action.kind == "BW" and place == microbatches - 1:
            yield U(stage, step)


def of_pipedream_2bw(stage: int, stages: int, microbatch: int, microbatches: int) -> int:
    """The same on all stages: as many updates as steps before this micro-batch's, less those that may be under way."""
    return max(0, microbatch // microbatches - -(-(stages - 1) // microbatches))


# ------------------------------------------------------------------------------------------ with B and W apart


def zb_h1(stage: int, stages: int, microbatches: int) -> Actions:
    """1F1B whose Ws are put off by `stage` micro-batches, into what was idle: all stages keep p micro-batches.

    Idle for (p-1)(t_F + t_B - t_W), from m = p on, if t_W is at most t_F and t_B: a third of 1F1B's if all are equal.

    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.1.
    """
    yield from _put_off(stage, microbatches, ahead=stages - 1 - stage, late=stage)


def zb_h2(stage: int, stages: int, microbatches: int) -> Actions:
    """As ZB-H1 with twice as many micro-batches under way: all stages keep 2p - 1.

    Idle between steps for (p-1)(t_F + t_B - 2 t_W), from m = 2p - 1 on, if t_W is at most t_F and t_B: not at all if
    all are equal.

    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.2.
    """
    yield from _put_off(stage, microbatches, ahead=2 * (stages - 1 - stage), late=2 * stage)


def _put_off(stage: int, microbatches: int, ahead: int, late: int) -> Actions:
    """1F1B with `ahead` forwards first, and W of the micro-batch that is `late` behind after every B."""
    for action in weave(ahead, *([kind(stage, m) for m in range(microbatches)] for kind in (F, B))):
        yield action
        if action.kind == "B" and action.microbatch >= late:
            yield W(stage, action.microbatch - late)
    yield from (W(stage, m) for m in range(max(0, microbatches - late), microbatches))


def zb_v(stage: int, stages: int, microbatches: int) -> Actions:
    """Down the stages and up again: the first stage has the loss, so that backwards begin there at once.

    Not idle between steps at all if t_F, t_B and t_W are equal, from m = 2p - 1 on; keeps p micro-batches (as 2p
    halves), as 1F1B's first stage does.

    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 6.
    """
    F0, F1, B0, B1, W0, W1 = (
        iter([kind(stage, m, chunk) for m in range(microbatches)]) for kind in (F, B, W) for chunk in (0, 1)
    )
    behind = stages - stage
    yield from turns(2 * behind - 1, F0)
    yield from turns(stage, F1, F0)
    yield from turns(behind, F1, B1, W1)
    yield from turns(microbatches - stages, F0, B0, W0, F1, B1, W1)
    yield from turns(stage, B0, B1)
    yield from turns(behind, B0, W0)
    yield from W1
    yield from W0


# ------------------------------------------------------------------------------------------ from both ends


def dualpipe(stage: int, stages: int, microbatches: int) -> Actions:
    """Micro-batches come from both ends at once, and fill each other's gaps; every stage has two parts of the model.

    The near chunk is the one whose micro-batches enter at the nearer end. Idle for (p/2-1)(t_F + t_B - t_W) if p and m
    are even, m is at least 2p, t_W at most t_B, and t_B at most t_F. Keeps p + 1 micro-batches. The paper's table has
    (p/2-1)(t_F&B + t_BW - 3 t_W), where a forward and a backward that overlap are one block of t_F&B; here they are two
    actions, and nobody waits for the end of both.

    DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.2.1, and github.com/deepseek-ai/DualPipe.
    """
    half, outer = (stages + 1) // 2, min(stage, stages - 1 - stage)
    inner = half - 1 - outer
    near = 0 if stage == outer else 1
    (F_near, BW_near), (F_far, BW_far) = (
        [iter([kind(stage, m, chunk) for m in range(chunk, microbatches, 2)]) for kind in (F, BW)]
        for chunk in (near, 1 - near)
    )
    yield from turns(2 * inner, F_near)
    yield from turns(outer + 1, F_near, F_far)
    for action in turns(inner, BW_far, F_far):
        yield from halves(action)
    yield from turns((microbatches + 1) // 2 - half - inner, F_near, BW_far, F_far, BW_near)
    yield from turns(inner, BW_far, F_far, BW_near)

    put_off: deque[Action] = deque()
    for turn, action in enumerate(turns(outer + 1, BW_far, BW_near)):
        first, *rest = [action] if turn <= outer else halves(action)
        yield first
        put_off.extend(rest)
    for action in turns(inner, BW_near):
        input_gradient, weights = halves(action)
        if put_off:
            yield put_off.popleft()
        yield input_gradient
        put_off.append(weights)
    yield from put_off


def dualpipe_v(stage: int, stages: int, microbatches: int) -> Actions:
    """DualPipe on twice as many stages, folded in the middle: every part of the model is on one stage only.

    Of two stages that have the same parts one does for the even micro-batches what the other does for the odd ones; so
    one of them is enough, and all micro-batches come from the same end. Idle as DualPipe on 2p stages.

    Qi et al., "DualPipe could be better without the dual", 2025; github.com/deepseek-ai/DualPipe.
    """
    for action in dualpipe(stage, 2 * stages, 2 * microbatches):
        yield action._replace(microbatch=action.microbatch // 2)


# ------------------------------------------------------------------------------------------ the table


def tabled(actions: Sequence[Sequence[Action]]) -> Callable[[int, int, int], Sequence[Action]]:
    """A schedule out of a table, such as `actions.from_csv` reads: right for its own number of stages only.

    Raises
    ------
    ValueError
        When it is called, for another number.
    """

    def schedule(stage: int, stages: int, microbatches: int) -> Sequence[Action]:
        if stages != len(actions):
            raise ValueError(f"stages: the table has lines of {len(actions)}, found {stages}")
        return actions[stage]

    return schedule


class Entry(NamedTuple):
    """A schedule's line in the table.

    Attributes
    ----------
    actions : callable (stage, stages, microbatches, ...) -> actions of that stage
        Has a parameter ``virtual`` if the number of chunks is the user's choice, and ``steps`` if it does not flush.
    placement : callable (stages) or (stages, virtual) -> Placement
        Which parts of the model are where.
    version : callable (stage, stages, microbatch, microbatches of a step) -> int, optional
        How many updates the weights have seen that a micro-batch uses there, forward and backward; without one, stages
        update together when a step is over, and all of it uses the same weights.
    """

    actions: Callable[..., Iterable[Action]]
    placement: Callable[..., Placement] = loop
    version: Callable[[int, int, int, int], int] | None = None


SCHEDULES: dict[str, Entry] = {
    "naive": Entry(naive),
    "gpipe": Entry(gpipe),
    "1f1b": Entry(one_f_one_b),
    "interleaved": Entry(interleaved),
    "pipedream": Entry(pipedream, version=of_pipedream),
    "pipedream-2bw": Entry(pipedream_2bw, version=of_pipedream_2bw),
    "zb-h1": Entry(zb_h1),
    "zb-h2": Entry(zb_h2),
    "zb-v": Entry(zb_v, vee),
    "dualpipe": Entry(dualpipe, opposed),
    "dualpipe-v": Entry(dualpipe_v, vee),
}
