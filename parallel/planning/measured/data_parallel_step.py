"""Predicted step of data-parallel layouts (DDP, ZeRO): passes unit by unit, exchanges of gradients and weights.

Of what a layout starts early a share goes on beside the computation: as much as cores and network cards move meanwhile.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from parallel.engine.data_parallel.grad_bucket import GradBucket, buckets_of, users_of
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel.param_store import resident_slots
from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.engine.grad_compression import NONE
from parallel.planning.measured.message_costs import MessageCosts
from parallel.planning.measured.step_timeline import COMPUTE, NETWORK, SHARED, UPDATE, StepTimeline


class UnitWork(NamedTuple):
    """Seconds of a unit for a micro-batch: forward, gradients of its input and of its weights, and its exchanges.

    Half of the exchanges are in each pass.
    """

    forward: float
    backward: float
    weights: float
    exchanges: float = 0.0


class RankGroup(NamedTuple):
    """Ranks with the same parameters: the partition of these among them, costs of messages, gradient compression."""

    plan: PartitionSpec
    ranks: Sequence[int]
    messages: MessageCosts
    compress: str = NONE

    @property
    def cause(self) -> str:
        return NETWORK if self.messages.over_network(self.ranks) else SHARED

    def seconds(self, collective: str, elements: int, weights: bool = False, idle: float = math.inf) -> float:
        """Seconds of a collective of gradients, or of `weights`, after a pause of `idle` seconds."""
        precision = self.plan.precision
        itemsize = (precision.storage if weights else precision.wide).itemsize
        name = collective if weights or self.compress == NONE else f"{collective}:{self.compress}"
        return self.messages.collective(name, self.ranks, elements * itemsize, True, idle)


class GradientExchange(NamedTuple):
    """Exchange of a layout's gradients.

    Attributes
    ----------
    when : str
        Of a bucket: at the step's "end", when it is "ready" in the last micro-batch, or in "each" one.
    overlaps : bool
        The backward pass goes on meanwhile.
    gathers_updates, gathers_units : bool
        Weights are gathered after the update, or for each pass of a unit.
    """

    collective: str
    when: str
    overlaps: bool = False
    gathers_updates: bool = False
    gathers_units: bool = False


EXCHANGES = {
    "dp-naive": GradientExchange("allreduce", "end"),
    "dp-bucket": GradientExchange("allreduce", "ready"),
    "dp": GradientExchange("allreduce", "ready", overlaps=True),
    "zero1": GradientExchange("reduce_scatter", "end", gathers_updates=True),
    "zero2": GradientExchange("reduce_scatter", "each", gathers_updates=True),
    "zero3": GradientExchange("reduce_scatter", "each", gathers_units=True),
}


def data_parallel_step(
    layout: str,
    units: Sequence[UnitWork],
    rounds: int,
    groups: Sequence[RankGroup],
    update: float,
    tensor: str = SHARED,
) -> StepTimeline:
    """Step of `rounds` micro-batches on a rank that takes `update` seconds to update its part of the weights.

    `groups` have different parameters (experts on different ranks, for example). `tensor` is the cause of units'
    exchanges.
    """
    return _DataParallelStep(layout, groups, tensor).run(units, rounds, update)


class _GroupBucket(NamedTuple):
    """Bucket of a group of ranks, the units that use it, and the memory of its gathered weights."""

    bucket: GradBucket
    users: tuple[int, ...]
    slot: tuple[int, ...]
    group: RankGroup


def _buckets(layout: str, groups: Sequence[RankGroup]) -> Iterator[_GroupBucket]:
    for number, group in enumerate(groups):
        buckets = buckets_of(LAYOUTS[layout].gradients.cut(group.plan), group.plan)
        users = users_of(buckets, group.plan)
        for bucket, of, slot in zip(buckets, users, resident_slots(users)):
            yield _GroupBucket(bucket, of, (number, *slot), group)


class _DataParallelStep:
    def __init__(self, layout: str, groups: Sequence[RankGroup], tensor: str):
        self._exchange, self._tensor = EXCHANGES[layout], tensor
        self._cause = NETWORK if NETWORK in (group.cause for group in groups) else SHARED
        self._buckets = list(_buckets(layout, groups))
        self._held: dict[tuple[int, ...], int] = {}
        self._arrives: dict[tuple[int, ...], float] = {}  # end of a gather by slot
        self._step, self._sent = StepTimeline(), 0.0  # end of the messages under way
        self._quiet = -math.inf  # end of the last message

    def run(self, units: Sequence[UnitWork], rounds: int, update: float) -> StepTimeline:
        step, exchange = self._step, self._exchange
        forward, backward = [*enumerate(units)], [*reversed([*enumerate(units)])]
        path = [number for number, _ in (*forward, *backward)] * rounds
        for turn in range(rounds):
            for number, unit in forward:
                self._gather(path)
                self._compute(f"F{number}", unit.forward, unit.exchanges / 2)
            for number, unit in backward:
                self._gather(path)
                self._compute(f"B{number}", unit.backward + unit.weights, unit.exchanges / 2)
                # a bucket's gradient is complete after its first unit, the last one of the backward pass
                if exchange.when == "each" or (exchange.when == "ready" and turn == rounds - 1):
                    self._reduce(each for each in self._buckets if each.users[0] == number)
        if exchange.when == "end":
            self._reduce(self._buckets)
        step.wait(self._sent, self._cause)
        step.spend("update", UPDATE, update)
        if exchange.gathers_updates:
            for each in self._buckets:
                self._start("allgatherv", each, beside=False, weights=True)
        return step

    def _compute(self, label: str, seconds: float, exchanges: float) -> None:
        self._step.spend(label, COMPUTE, seconds)
        self._step.spend(f"{label} exchanges", self._tensor, exchanges)

    def _seconds(self, collective: str, each: _GroupBucket, weights: bool = False) -> float:
        """Seconds of a bucket's collective if it begins as soon as those under way have ended."""
        idle = max(self._sent, self._step.now) - self._quiet
        return each.group.seconds(collective, each.bucket.span.size, weights, idle)

    def _move(self, label: str, each: _GroupBucket, seconds: float) -> None:
        self._step.spend(f"{label} {each.bucket.number}", each.group.cause, seconds)
        self._quiet = self._step.now

    def _reduce(self, buckets: Iterable[_GroupBucket]) -> None:
        for each in buckets:
            self._start(self._exchange.collective, each, self._exchange.overlaps)

    def _start(self, name: str, each: _GroupBucket, beside: bool, weights: bool = False) -> None:
        """Start a bucket's collective.

        The part that is not hidden takes time now, the rest runs `beside` the computation.
        """
        group, seconds = each.group, self._seconds(name, each, weights)
        hidden = group.messages.hidden(group.ranks, name) if beside else 0.0
        self._move(name, each, (1 - hidden) * seconds)
        if hidden:
            start, label = max(self._sent, self._step.now), f"{name} {each.bucket.number}"
            self._sent = self._quiet = self._step.beside(label, group.cause, start, hidden * seconds)

    def _gather(self, path: list[int]) -> None:
        """Take the next unit from the path: gather its weights unless present, and start the next unit's gather."""
        here, after = path.pop(0), path[0] if path else None
        if not self._exchange.gathers_units:
            return
        needs = [each for each in self._buckets if here in each.users]
        for each in needs:
            self._fetch(each, beside=False)
        for each in needs:
            self._step.wait(self._arrives.pop(each.slot, 0.0), each.group.cause)
        busy = {each.slot for each in needs}
        # a slot that this unit uses is not free for the next one's weights yet
        for each in self._buckets:
            if after in each.users and each.slot not in busy:
                self._fetch(each, beside=True)

    def _fetch(self, each: _GroupBucket, beside: bool) -> None:
        if self._held.get(each.slot) != each.bucket.number:
            self._held[each.slot] = each.bucket.number
            self._start("allgatherv", each, beside, weights=True)
            self._arrives[each.slot] = self._sent if beside else 0.0
