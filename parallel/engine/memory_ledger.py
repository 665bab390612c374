"""Memory ledger: predicted and allocated bytes by kind on one rank.

The formulas use shapes alone and do not share code with the allocations, so that tests compare the two. An engine
enters each kind of step (`MemoryLedger.expect`); its forecast enters the same steps before there is an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from parallel.data_parallel.ddp import BucketedDDP, NaiveDDP, OverlappedDDP
from parallel.data_parallel.grad_bucket import GradBucket, buckets_of, users_of
from parallel.data_parallel.param_store import resident_slots, slot_sizes
from parallel.data_parallel.partition_spec import PartitionSpec
from parallel.data_parallel.zero import Zero1, Zero2, Zero3, slots
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import BLOCK
from parallel.nn.operator import ArraySpec, nbytes_of
from parallel.runtime.tree_sum import tree_forecast

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Weights in storage type; gradients; master weights and optimizer state; saved activations; other memory."""

Numbers = Sequence[tuple[int, ...]]


class Workload(NamedTuple):
    """The steps of a training, by their sizes, and the rank that makes them.

    Attributes
    ----------
    rank, ranks : int
    shapes : callable (samples) -> (Spec, Spec)
        Inputs and targets of a micro-batch, in the types that the model takes.
    steps : sequence of tuple of int
        Samples of each micro-batch, for every kind of step that occurs.
    drawn : bool
        Whether ranks draw their micro-batches. Any rank may have any of them then. How many a rank has is not known
        before: the forecast of a reproducible training, whose gradients depend on it, takes an even share.
    """

    rank: int
    ranks: int
    shapes: Callable[[int], tuple[ArraySpec, ArraySpec]]
    steps: Sequence[tuple[int, ...]]
    drawn: bool = False


class MemoryLedger:
    """Peak bytes by kind.

    Attributes
    ----------
    allocated : Counter
        Bytes of the arrays.
    work : int
        Peak bytes of temporaries within a unit, by the operators' outlines.
    """

    def __init__(self, allocated: Counter[str] | None = None):
        self.allocated: Counter[str] = Counter() if allocated is None else allocated
        self.work = 0
        self._most: dict[Hashable, Counter[str]] = {}

    @property
    def predicted(self) -> Counter[str]:
        """Predicted bytes of the steps that were entered; without activations before the first."""
        return sum(self._most.values(), Counter())

    @property
    def needed(self) -> Counter[str]:
        """Predicted bytes, with temporaries."""
        return self.predicted + Counter(temporaries=self.work)

    def expect(self, predicted: Counter[str], work: int = 0, part: Hashable = None) -> None:
        """Enter a kind of step.

        Parameters
        ----------
        predicted : Counter
            Bytes by kind. Memory is kept from step to step, so the larger number of each kind counts.
        work : int
            Bytes of temporaries.
        part : hashable, optional
            Of parts that keep memory of their own, the one that needs it: two may need most in different steps.
        """
        self._most[part] = self._most.get(part, Counter()) | predicted
        self.work = max(self.work, work)

    def table(self) -> str:
        """Both, in megabytes, as lines of text."""
        lines = [f"{'MB':12}{'predicted':>12}{'allocated':>12}"]
        for kind in KINDS:
            lines.append(f"{kind:12}{self.predicted[kind] / 1e6:12.3f}{self.allocated[kind] / 1e6:12.3f}")
        total = sum(self.predicted.values()) / 1e6, sum(self.allocated.values()) / 1e6
        return "\n".join([*lines, f"{'together':12}{total[0]:12.3f}{total[1]:12.3f}"])


def predict(plan: PartitionSpec, layout: str, states: int, everyone: Numbers) -> Counter[str]:
    """Bytes of everything but activations.

    Parameters
    ----------
    plan : PartitionSpec
    layout : str
        A key of `FORMULAS`.
    states : int
        The optimiser's vectors.
    everyone : sequence of tuple of int
        The micro-batches of every rank; they count in reproducible training only.
    """
    return predict_part(plan, layout, states, everyone) + Counter(buffers=plan.flat.length // BLOCK * 8)


def predict_part(plan: PartitionSpec, layout: str, states: int, everyone: Numbers) -> Counter[str]:
    """The same of a part of the vector, without the block sums, which are of all of it."""
    wide, master = plan.precision.wide.itemsize, plan.precision.master
    bytes_, own = FORMULAS[layout](plan, everyone)
    bytes_["optimizer"] = own * wide * (states + master)
    return bytes_


def predict_activations(plan: PartitionSpec, loss: Any, x: ArraySpec, y: ArraySpec) -> tuple[int, int]:
    """Bytes that are alive between forward and backward of a micro-batch, and of temporaries at the worst moment."""
    model = Sequential(plan.units).outline(x)
    end = loss.outline(model.y, y)
    return nbytes_of((model.y, y, model.saved, end.saved)), max(model.work, end.work)


# ------------------------------------------------------------------------------------------ a formula for each layout


def _whole_gradients(
    cut: Callable[[PartitionSpec], Any], divided: bool, plan: PartitionSpec, everyone: Numbers
) -> tuple[Counter[str], int]:
    """Bytes of layouts with all weights and one gradient vector; reproducible ones add nodes of the tree."""
    length, wide = plan.flat.length, plan.precision.wide.itemsize
    buckets = buckets_of(cut(plan), plan)
    owned = [bucket.own.size for bucket in buckets]
    gradients, buffers = length, max(owned, default=0) if divided else 0
    if plan.reproducible:
        gradients += tree_forecast(everyone[plan.rank]).taken * length
        buffers += sum(owned) * sum(len(tree_forecast(numbers).nodes) for numbers in everyone)
    if plan.compress is not None and plan.compress.feedback:
        buffers += 2 * length  # residuals of this step and of the one before
    buffers += plan.scratch(adds=True)
    sizes = {"parameters": length * plan.precision.storage.itemsize, "gradients": gradients * wide}
    return Counter({**sizes, "buffers": buffers * wide}), sum(owned) if divided else length


def _sharded_gradients(
    cut: Callable[[PartitionSpec], Any], resident: bool, plan: PartitionSpec, everyone: Numbers
) -> tuple[Counter[str], int]:
    """Bytes of layouts with a shard of gradients and the buckets in use; ZeRO-3 also shards the weights."""
    storage, wide = plan.precision.storage.itemsize, plan.precision.wide.itemsize
    buckets = buckets_of(cut(plan), plan)
    users, own = users_of(buckets, plan), sum(bucket.own.size for bucket in buckets)
    gradients = own + sum(slots(users, [bucket.span.size for bucket in buckets])[1])
    if plan.reproducible:
        turns = range(max(map(len, everyone)))
        order = tuple(numbers[turn] for turn in turns for numbers in everyone if turn < len(numbers))
        gradients += own * tree_forecast(order).kept
    parts = plan.ranks if plan.reproducible else 1  # of a bucket, that arrive at once
    buffers = (parts * max((bucket.own.size for bucket in buckets), default=0) + plan.scratch(adds=False)) * wide
    if resident:
        buffers += _resident(buckets, users) * storage
    parameters = (own if resident else plan.flat.length) * storage
    return Counter({"parameters": parameters, "gradients": gradients * wide, "buffers": buffers}), own


def _resident(buckets: Sequence[GradBucket], users: Sequence[tuple[int, ...]]) -> int:
    return sum(slot_sizes(resident_slots(users), buckets).values())


FORMULAS: dict[str, Callable[[PartitionSpec, Numbers], tuple[Counter[str], int]]] = {
    "dp-naive": lambda plan, everyone: _whole_gradients(NaiveDDP.cut, False, plan, everyone),
    "dp-bucket": lambda plan, everyone: _whole_gradients(BucketedDDP.cut, False, plan, everyone),
    "dp": lambda plan, everyone: _whole_gradients(OverlappedDDP.cut, False, plan, everyone),
    "zero1": lambda plan, everyone: _whole_gradients(Zero1.cut, True, plan, everyone),
    "zero2": lambda plan, everyone: _sharded_gradients(Zero2.cut, False, plan, everyone),
    "zero3": lambda plan, everyone: _sharded_gradients(Zero3.cut, True, plan, everyone),
}
"""By layout: parameters, gradients and buffers in bytes, and the elements that the rank updates."""


# ------------------------------------------------------------------------------------------ on paper


class MemoryRecipe(NamedTuple):
    """Bytes of a parameter: weights, gradients, and the optimiser's."""

    weights: int
    gradients: int
    optimizer: int


RECIPES = {16: MemoryRecipe(2, 2, 12), 18: MemoryRecipe(2, 4, 12), 20: MemoryRecipe(2, 6, 12)}
"""Adam with half weights and a float32 master, by bytes a parameter: with half gradients, float32 gradients, and both.
"""


def on_paper(parameters: float, ranks: int, stage: int, recipe: MemoryRecipe = RECIPES[16]) -> float:
    """Bytes of model and optimiser on each rank with ZeRO's stage 0 to 3 (Rajbhandari et al. 2020, figure 1).

    >>> [round(on_paper(7.5e9, 64, stage) / 1e9, 2) for stage in range(4)]
    [120.0, 31.41, 16.64, 1.88]
    """
    divided = (ranks if stage >= 3 else 1, ranks if stage >= 2 else 1, ranks if stage >= 1 else 1)
    return sum(parameters * nbytes / parts for nbytes, parts in zip(recipe, divided))
