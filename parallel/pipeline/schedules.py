"""Pipeline schedules: for one stage, what it computes in which order; a function each, and a line in the table.

A schedule is a generator ``(stage, stages, microbatches, ...)`` of actions of that stage: F and BW, or F, B and W, and
U where stages update without waiting for each other. It knows no message, no time and no array. `plan.build` makes it a
plan, `lowering` adds messages, `simulate` proves and times it. In formulas p is the stages and m the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from parallel.pipeline.actions import BW, Action, F, U
from parallel.pipeline.placement import Placement, loop


def weave(ahead: int, forwards: Iterable[Action], backwards: Iterable[Action]) -> Iterator[Action]:
    """First `ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    forwards, backwards = list(forwards), iter(backwards)
    yield from forwards[:ahead]
    for forward in forwards[ahead:]:
        yield forward
        yield next(backwards)
    yield from backwards


def gpipe(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards.

    Idle for (p-1)(t_F + t_BW) of a step, a share of (p-1)/(m+p-1); keeps m micro-batches. Backwards come in the order
    of the forwards, where the paper has them in reverse: it costs the same.

    Huang et al., "GPipe", NeurIPS 2019, section 2.3.
    """
    yield from (F(stage, m) for m in range(microbatches))
    yield from (BW(stage, m) for m in range(microbatches))


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """As many forwards as there are stages behind, then a backward after every forward.

    Idle as long as GPipe, but keeps only p - stage micro-batches.

    Narayanan et al., "PipeDream", SOSP 2019, section 3.2; with a flush: Narayanan et al., ICML 2021.
    """
    forwards, backwards = ([kind(stage, m) for m in range(microbatches)] for kind in (F, BW))
    yield from weave(stages - 1 - stage, forwards, backwards)


def pipedream(stage: int, stages: int, microbatches: int, steps: int) -> Iterator[Action]:
    """1F1B without a flush: every backward is followed by an update, and uses the weights that its forward used.

    Never idle but while the pipeline fills and drains. A stage keeps as many versions of its weights as micro-batches,
    p - stage.

    Harlap et al., "PipeDream", 2018, section 3.3; Narayanan et al., SOSP 2019, section 3.3 ("weight stashing").
    """
    for action in one_f_one_b(stage, stages, microbatches * steps):
        yield action
        if action.kind == "BW":
            yield U(stage, action.microbatch)


def of_pipedream(stage: int, stages: int, microbatch: int, microbatches: int) -> int:
    """All updates but those of the p-1 - stage micro-batches that are still under way."""
    return max(0, microbatch - (stages - 1 - stage))


def pipedream_2bw(stage: int, stages: int, microbatches: int, steps: int) -> Iterator[Action]:
    """1F1B without a flush, an update after every `microbatches` backwards: two versions of the weights will do.

    The weights that a step's micro-batches use are everywhere those before the last update.

    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1.
    """
    for action in one_f_one_b(stage, stages, microbatches * steps):
        yield action
        step, place = divmod(action.microbatch, microbatches)
        if action.kind == "BW" and place == microbatches - 1:
            yield U(stage, step)


def of_pipedream_2bw(stage: int, stages: int, microbatch: int, microbatches: int) -> int:
    """One update less than there were steps before this micro-batch's."""
    return max(0, microbatch // microbatches - 1)


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
    "gpipe": Entry(gpipe),
    "1f1b": Entry(one_f_one_b),
    "pipedream": Entry(pipedream, version=of_pipedream),
    "pipedream-2bw": Entry(pipedream_2bw, version=of_pipedream_2bw),
}
