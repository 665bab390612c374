"""Bytes by kind on one rank: what a training will take, from shapes alone, and what it has taken.

The forecast knows nothing of the code that allocates; that both come to the same numbers is a test of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from parallel.data_parallel.grad_bucket import Bucket, buckets_of
from parallel.runtime.tree_sum import played
from parallel.data_parallel.ddp import Bucketed, Naive, Overlapped
from parallel.nn.flat_params import BLOCK
from parallel.nn.compose import Sequential
from parallel.nn.operator import Spec, nbytes_of
from parallel.data_parallel.partition_spec import Plan
from parallel.data_parallel.param_store import resident_slots, slot_sizes
from parallel.data_parallel.zero import Stage1, Stage2, Stage3, slots, users_of

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Parameters as operators see them; gradients; master weights and moments; what forward saves; all else that stays."""

Numbers = Sequence[tuple[int, ...]]


class Ledger:
    """Bytes by kind: the most there have been so far.

    Attributes
    ----------
    allocated : Counter
        As the arrays themselves say.
    predicted : Counter
        By `predict`, of the steps that were made. Before the first one there are no activations.
    work : int
        Bytes of temporaries at the worst moment, by the operators' outlines: they come and go within a unit.
    """

    def __init__(self, allocated: Counter[str], predicted: Counter[str]):
        self.allocated, self.predicted, self.work = allocated, predicted, 0

    def expect(self, predicted: Counter[str], work: int) -> None:
        """A step of another kind is made."""
        self.predicted |= predicted  # the larger one of each
        self.work = max(self.work, work)

    def table(self) -> str:
        """Both, in megabytes, as lines of text."""
        lines = [f"{'MB':12}{'predicted':>12}{'allocated':>12}"]
        for kind in KINDS:
            lines.append(f"{kind:12}{self.predicted[kind] / 1e6:12.3f}{self.allocated[kind] / 1e6:12.3f}")
        total = sum(self.predicted.values()) / 1e6, sum(self.allocated.values()) / 1e6
        return "\n".join([*lines, f"{'together':12}{total[0]:12.3f}{total[1]:12.3f}"])


def predict(plan: Plan, layout: str, states: int, everyone: Numbers) -> Counter[str]:
    """Bytes of everything but activations.

    Parameters
    ----------
    plan : Plan
    layout : str
        A key of `FORMULAS`.
    states : int
        The optimiser's vectors.
    everyone : sequence of tuple of int
        The micro-batches of every rank; they count in reproducible training only.
    """
    return predict_part(plan, layout, states, everyone) + Counter(buffers=plan.flat.length // BLOCK * 8)


def predict_part(plan: Plan, layout: str, states: int, everyone: Numbers) -> Counter[str]:
    """The same of a part of the vector, without the block sums, which are of all of it."""
    wide, master = plan.precision.wide.itemsize, plan.precision.master
    bytes_, own = FORMULAS[layout](plan, everyone)
    bytes_["optimizer"] = own * wide * (states + master)
    return bytes_


def predict_activations(plan: Plan, loss: Any, x: Spec, y: Spec) -> tuple[int, int]:
    """Bytes that are alive between forward and backward of a micro-batch, and of temporaries at the worst moment."""
    model = Sequential(plan.units).outline(x)
    end = loss.outline(model.y, y)
    return nbytes_of((model.y, y, model.saved, end.saved)), max(model.work, end.work)


# ------------------------------------------------------------------------------------------ a formula for each layout


def _together(cut: Callable[[Plan], Any], divided: bool, plan: Plan, everyone: Numbers) -> tuple[Counter[str], int]:
    """All weights; one vector of gradients; in canonical order the nodes of this rank, and of all for its part."""
    length, wide = plan.flat.length, plan.precision.wide.itemsize
    buckets = buckets_of(cut(plan), plan)
    owned = [bucket.own.size for bucket in buckets]
    gradients, buffers = length, max(owned, default=0) if divided else 0
    if plan.reproducible:
        gradients += played(everyone[plan.rank]).taken * length
        buffers += sum(owned) * sum(len(played(numbers).nodes) for numbers in everyone)
    if plan.compress is not None and plan.compress.feedback:
        buffers += 2 * length  # what is owed, and what was before the step
    buffers += plan.scratch(adds=True)
    sizes = {"parameters": length * plan.precision.storage.itemsize, "gradients": gradients * wide}
    return Counter({**sizes, "buffers": buffers * wide}), sum(owned) if divided else length


def _apart(cut: Callable[[Plan], Any], resident: bool, plan: Plan, everyone: Numbers) -> tuple[Counter[str], int]:
    """A part of the gradients, and buckets being filled; of the weights too, and units being used."""
    storage, wide = plan.precision.storage.itemsize, plan.precision.wide.itemsize
    buckets = buckets_of(cut(plan), plan)
    users, own = users_of(buckets, plan), sum(bucket.own.size for bucket in buckets)
    gradients = own + sum(slots(users, [bucket.span.size for bucket in buckets])[1])
    if plan.reproducible:
        turns = range(max(map(len, everyone)))
        order = tuple(numbers[turn] for turn in turns for numbers in everyone if turn < len(numbers))
        gradients += own * played(order).kept
    parts = plan.ranks if plan.reproducible else 1  # of a bucket, that arrive at once
    buffers = (parts * max((bucket.own.size for bucket in buckets), default=0) + plan.scratch(adds=False)) * wide
    if resident:
        buffers += _resident(buckets, users) * storage
    parameters = (own if resident else plan.flat.length) * storage
    return Counter({"parameters": parameters, "gradients": gradients * wide, "buffers": buffers}), own


def _resident(buckets: Sequence[Bucket], users: Sequence[tuple[int, ...]]) -> int:
    return sum(slot_sizes(resident_slots(users), buckets).values())


FORMULAS: dict[str, Callable[[Plan, Numbers], tuple[Counter[str], int]]] = {
    "dp-naive": lambda plan, everyone: _together(Naive.cut, False, plan, everyone),
    "dp-bucket": lambda plan, everyone: _together(Bucketed.cut, False, plan, everyone),
    "dp": lambda plan, everyone: _together(Overlapped.cut, False, plan, everyone),
    "zero1": lambda plan, everyone: _together(Stage1.cut, True, plan, everyone),
    "zero2": lambda plan, everyone: _apart(Stage2.cut, False, plan, everyone),
    "zero3": lambda plan, everyone: _apart(Stage3.cut, True, plan, everyone),
}
"""By layout: parameters, gradients and buffers in bytes, and the elements that the rank updates."""


# ------------------------------------------------------------------------------------------ on paper


class Recipe(NamedTuple):
    """Bytes of a parameter: weights, gradients, and the optimiser's."""

    weights: int
    gradients: int
    optimizer: int


RECIPES = {16: Recipe(2, 2, 12), 18: Recipe(2, 4, 12), 20: Recipe(2, 6, 12)}
"""Adam with half weights and a float32 master, by bytes a parameter: with half gradients, float32 gradients, and both.
"""


def on_paper(parameters: float, ranks: int, stage: int, recipe: Recipe = RECIPES[16]) -> float:
    """Bytes of model and optimiser on each rank with ZeRO's stage 0 to 3 (Rajbhandari et al. 2020, figure 1).

    >>> [round(on_paper(7.5e9, 64, stage) / 1e9, 2) for stage in range(4)]
    [120.0, 31.41, 16.64, 1.88]
    """
    divided = (ranks if stage >= 3 else 1, ranks if stage >= 2 else 1, ranks if stage >= 1 else 1)
    return sum(parameters * nbytes / parts for nbytes, parts in zip(recipe, divided))
