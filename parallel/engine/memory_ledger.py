"""Memory ledger: predicted and allocated bytes on one rank, by kind (parameters, gradients, activations, ...).

The formulas use shapes alone; tests compare them with the allocations. An engine enters each kind of step
(`MemoryLedger.expect`); its forecast enters the same steps before there is an engine.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from parallel.engine.data_parallel.ddp import BucketedDDP, NaiveDDP, OverlappedDDP
from parallel.engine.data_parallel.expert_shards import RankGroups
from parallel.engine.data_parallel.grad_bucket import buckets_of, users_of
from parallel.engine.data_parallel.param_store import resident_slots, slot_sizes
from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.engine.data_parallel.reducers import Assignment, Turns
from parallel.engine.data_parallel.zero import Zero1, Zero2, Zero3, slots
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import BLOCK
from parallel.nn.kernels.causal_attention import outlines_on
from parallel.nn.operator import ArraySpec, Operator, nbytes_of
from parallel.nn.trial_outline import loss_outline
from parallel.runtime.tree_sum import tree_forecast

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Weights in storage type; gradients; master weights and optimizer state; saved activations; other memory."""


class Workload(NamedTuple):
    """Input of a memory forecast: micro-batch sizes of each kind of step, number of ranks, and the rank in question.

    `shapes` gives inputs and targets of a micro-batch of so many samples; `steps` are the samples of each micro-batch,
    for every kind of step. If ranks draw micro-batches (`drawn`), any rank may have any of them. Reproducible gradients
    depend on their number, which is not known before: the forecast takes an even share.
    """

    rank: int
    ranks: int
    shapes: Callable[[int], tuple[ArraySpec, ArraySpec]]
    steps: Sequence[tuple[int, ...]]
    drawn: bool = False


class MemoryLedger:
    """Allocated and predicted peak bytes by kind on one rank; `work`: predicted peak of the operators' temporaries."""

    def __init__(self, allocated: Counter[str] | None = None):
        self.allocated: Counter[str] = Counter() if allocated is None else allocated
        self.work = 0
        self._most: dict[Hashable, Counter[str]] = {}

    @property
    def predicted(self) -> Counter[str]:
        """Predicted peak bytes by kind over all steps given to `expect` (no activations before the first step)."""
        return sum(self._most.values(), Counter())

    @property
    def needed(self) -> Counter[str]:
        return self.predicted + Counter(temporaries=self.work)

    def expect(self, predicted: Counter[str], work: int = 0, part: Hashable = None) -> None:
        """Add the prediction for a step, bytes by kind and of temporaries (`work`); the ledger keeps each maximum.

        `part` names a part with memory of its own: two parts may need most in different steps.
        """
        self._most[part] = self._most.get(part, Counter()) | predicted
        self.work = max(self.work, work)

    def expect_step(self, groups: RankGroups, layout: str, states: int, assignment: Assignment) -> None:
        """Add the prediction for a step of data-parallel ranks, without activations (`predict_part`)."""
        self.expect(Counter(buffers=groups.plan.flat.length // BLOCK * 8))
        for number, (group, numbers) in enumerate(zip(groups.held, groups.numbers(assignment))):
            self.expect(predict_part(group.division, layout, states, numbers), part=number)


def predict_part(plan: PartitionSpec, layout: str, states: int, assignment: Turns) -> Counter[str]:
    """Predicted bytes by kind on the plan's rank, without activations, if the optimizer has `states` state vectors.

    Without the buffer of gradient norms, which all parts of the vector share. The assignment of micro-batches counts in
    reproducible training only.
    """
    wide, master = plan.precision.wide.itemsize, plan.precision.master
    bytes_, own = FORMULAS[layout](plan, assignment)
    bytes_["optimizer"] = own * wide * (states + master)
    return bytes_


def predict_activations(
    units: Sequence[Operator], loss: Any, x: ArraySpec, y: ArraySpec, *, in_flight: int = 1, device: str = "cpu"
) -> tuple[Counter[str], int]:
    """Predict (bytes of activations saved from forward to backward, peak bytes of temporaries) on a device.

    Of so many micro-batches `in_flight` at a time; of two, one gains what the other releases, if units are alike.
    """
    with outlines_on(device):
        model = Sequential(units).outline(x)
    end = loss_outline(loss, model.y, y)
    kept = nbytes_of((model.y, y, model.saved, end.saved))
    return Counter(activations=in_flight * kept), in_flight * max(model.work, end.work)


# ------------------------------------------------------------------------------------------ a formula for each layout


def _whole_gradients(
    cut: Callable[[PartitionSpec], Any], divided: bool, plan: PartitionSpec, assignment: Turns
) -> tuple[Counter[str], int]:
    length, wide = plan.flat.length, plan.precision.wide.itemsize
    buckets = buckets_of(cut(plan), plan)
    owned = [bucket.own.size for bucket in buckets]
    gradients, buffers = length, max(owned, default=0) if divided else 0
    if plan.reproducible:
        gradients += tree_forecast(assignment[plan.rank]).taken * length
        buffers += sum(owned) * sum(len(tree_forecast(numbers).nodes) for numbers in assignment)
    if plan.compress is not None and plan.compress.feedback:
        buffers += 2 * length  # residuals of this step and of the one before
    buffers += plan.scratch(adds=True)
    sizes = {"parameters": length * plan.precision.storage.itemsize, "gradients": gradients * wide}
    return Counter({**sizes, "buffers": buffers * wide}), sum(owned) if divided else length


def _sharded_gradients(
    cut: Callable[[PartitionSpec], Any], resident: bool, plan: PartitionSpec, assignment: Turns
) -> tuple[Counter[str], int]:
    """Predicted bytes by kind, and elements updated by the rank, for ZeRO-2, or ZeRO-3 if `resident`."""
    storage, wide = plan.precision.storage.itemsize, plan.precision.wide.itemsize
    buckets = buckets_of(cut(plan), plan)
    users, own = users_of(buckets, plan), sum(bucket.own.size for bucket in buckets)
    gradients = own + sum(slots(users, [bucket.span.size for bucket in buckets])[1])
    if plan.reproducible:
        turns = range(max(map(len, assignment)))
        order = tuple(numbers[turn] for turn in turns for numbers in assignment if turn < len(numbers))
        gradients += own * tree_forecast(order).kept
    parts = plan.ranks if plan.reproducible else 1  # of a bucket, that arrive at once
    buffers = (parts * max((bucket.own.size for bucket in buckets), default=0) + plan.scratch(adds=False)) * wide
    if resident:
        buffers += sum(slot_sizes(resident_slots(users), buckets).values()) * storage
    parameters = (own if resident else plan.flat.length) * storage
    return Counter({"parameters": parameters, "gradients": gradients * wide, "buffers": buffers}), own


FORMULAS: dict[str, Callable[[PartitionSpec, Turns], tuple[Counter[str], int]]] = {
    "dp-naive": partial(_whole_gradients, NaiveDDP.cut, False),
    "dp-bucket": partial(_whole_gradients, BucketedDDP.cut, False),
    "dp": partial(_whole_gradients, OverlappedDDP.cut, False),
    "zero1": partial(_whole_gradients, Zero1.cut, True),
    "zero2": partial(_sharded_gradients, Zero2.cut, False),
    "zero3": partial(_sharded_gradients, Zero3.cut, True),
}
"""By layout: parameters, gradients and buffers in bytes, and the elements that the rank updates."""
