"""Predicted step of data-parallel layouts (DDP, ZeRO): passes unit by unit, exchanges of gradients and weights.

Of what a layout starts early a share goes on beside the computation: as much as cores and network cards move meanwhile.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from parallel.data_parallel.grad_bucket import GradBucket, buckets_of, users_of
from parallel.data_parallel.layouts import LAYOUTS
from parallel.data_parallel.param_store import resident_slots
from parallel.data_parallel.partition_spec import PartitionSpec
from parallel.forecast.message_costs import MessageCosts
from parallel.forecast.step_timeline import COMPUTE, NETWORK, SHARED, UPDATE, StepTimeline


class UnitWork(NamedTuple):
    """Seconds of a unit for a micro-batch: forward, gradients of its input and of its weights, and exchanges along tp.

    Half of the exchanges are in each pass.
    """

    forward: float
    backward: float
    weights: float
    exchanges: float = 0.0


class RankGroup(NamedTuple):
    """Ranks with the same parameters: the partition of these among them, and costs of messages."""

    plan: PartitionSpec
    ranks: Sequence[int]
    messages: MessageCosts

    @property
    def cause(self) -> str:
        return NETWORK if self.messages.over_network(self.ranks) else SHARED

    def seconds(self, collective: str, elements: int, weights: bool = False) -> float:
        """Seconds of a collective of gradients, or of `weights`."""
        precision = self.plan.precision
        itemsize = (precision.storage if weights else precision.wide).itemsize
        return self.messages.collective(collective, self.ranks, elements * itemsize, shared=True)


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
    layout: str, units: Sequence[UnitWork], rounds: int, group: RankGroup, update: float, tensor: str = SHARED
) -> StepTimeline:
    """Step of `rounds` micro-batches on a rank that takes `update` seconds to update its part of the weights.

    `tensor` is the cause of exchanges along tp.
    """
    return _DataParallelStep(layout, group, tensor).run(units, rounds, update)


class _DataParallelStep:
    def __init__(self, layout: str, group: RankGroup, tensor: str):
        self._exchange, self._group, self._tensor = EXCHANGES[layout], group, tensor
        self._buckets = buckets_of(LAYOUTS[layout].gradients.cut(group.plan), group.plan)
        self._users = users_of(self._buckets, group.plan)
        self._slots = resident_slots(self._users)
        self._held: dict[object, int] = {}
        self._step, self._sent = StepTimeline(), 0.0  # end of the messages under way

    def run(self, units: Sequence[UnitWork], rounds: int, update: float) -> StepTimeline:
        step, exchange = self._step, self._exchange
        for turn in range(rounds):
            for number, unit in enumerate(units):
                self._gather(number)
                self._compute(f"F{number}", unit.forward, unit.exchanges / 2)
            for number, unit in reversed([*enumerate(units)]):
                self._gather(number)
                self._compute(f"B{number}", unit.backward + unit.weights, unit.exchanges / 2)
                if exchange.when == "each" or (exchange.when == "ready" and turn == rounds - 1):
                    self._reduce(bucket for bucket, of in zip(self._buckets, self._users) if of[0] == number)
        if exchange.when == "end":
            self._reduce(self._buckets)
        step.wait(self._sent, self._group.cause)
        step.spend("update", UPDATE, update)
        if exchange.gathers_updates:
            for bucket in self._buckets:
                self._move(f"gather {bucket.number}", self._group.seconds("allgatherv", bucket.span.size, weights=True))
        return step

    def _compute(self, label: str, seconds: float, exchanges: float) -> None:
        self._step.spend(label, COMPUTE, seconds)
        self._step.spend(f"{label} exchanges", self._tensor, exchanges)

    def _move(self, label: str, seconds: float) -> None:
        self._step.spend(label, self._group.cause, seconds)

    def _reduce(self, buckets: Iterable[GradBucket]) -> None:
        for bucket in buckets:
            seconds = self._group.seconds(self._exchange.collective, bucket.span.size)
            label = f"{self._exchange.collective} {bucket.number}"
            hidden = self._group.messages.hidden(self._group.ranks) if self._exchange.overlaps else 0.0
            self._move(label, (1 - hidden) * seconds)
            if hidden:
                start = max(self._sent, self._step.now)
                self._sent = self._step.beside(label, self._group.cause, start, hidden * seconds)

    def _gather(self, unit: int) -> None:
        """Gather the weights of a unit, unless they are still there."""
        if not self._exchange.gathers_units:
            return
        for bucket, users in zip(self._buckets, self._users):
            slot = self._slots[bucket.number]
            if unit in users and self._held.get(slot) != bucket.number:
                self._held[slot] = bucket.number
                seconds = self._group.seconds("allgatherv", bucket.span.size, weights=True)
                self._move(f"gather {bucket.number}", seconds)
