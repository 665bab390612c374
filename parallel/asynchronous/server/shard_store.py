"""State of a server: weights, optimizer state and pushed gradients of every key. No MPI.

`SyncStore` adds the gradients of a step and makes one update of them, like data parallelism. `AsyncStore` makes an
update of every gradient. Weights are sent without a copy. An update during a send writes to a copy.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from parallel.asynchronous.server.key_assignment import ServerKey
from parallel.asynchronous.server.messages import MessageHandle, ServerMessage
from parallel.engine.data_parallel.sharded_optimizer import in_order, numbers_of
from parallel.nn.kernels.storage import narrow
from parallel.optim.grad_norm import block_squares, clip_factor
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.optim.param_groups import RateClock, frozen_of
from parallel.runtime.tree_sum import TreeNode, TreeSum, VectorPool
from quant.types import Array


class ShardState:
    """Weights and optimizer state (`piece`) of one key, and sends that read them. `prepare` sets the gradient."""

    def __init__(self, key: ServerKey, piece: OptimizerSpan):
        self.key, self.piece = key, piece
        self._readers: list[MessageHandle] = []

    @property
    def visible(self) -> Array:
        return self.piece.weights if self.piece.stored is None else self.piece.stored

    def add_reader(self, reader: MessageHandle) -> None:
        """Register a message that is sent straight from `visible`: until it is done, updates write to a copy."""
        self._readers = [other for other in (*self._readers, reader) if not other.done()]

    def prepare(self, gradient: Array) -> OptimizerSpan:
        """Set the gradient and return the piece for an update. Weights that a message still reads are copied first."""
        piece = self.piece
        if not all(reader.done() for reader in self._readers):
            if piece.stored is None:
                piece.weights = piece.weights.copy()
            else:
                piece.stored = piece.stored.copy()
        self._readers, piece.gradient = [], gradient
        return piece

    def count_missed(self) -> None:
        """Count an update that was made as missed by parameters that are frozen."""
        self.piece.missed.count(frozen_of(place.parameter for place in self.piece.places), 1)

    def refresh(self) -> None:
        """Recompute the weights in storage precision, if kept apart, after an assignment to the weights."""
        if self.piece.stored is not None:
            narrow(self.piece.weights, self.piece.stored.dtype, out=self.piece.stored)


class ShardStore:
    """Base class of `AsyncStore` and `SyncStore`: all keys of a server. ``make(size, dtype)`` allocates gradients.

    `applied` is the number of steps whose gradients are all in the weights, `updates` the number of updates of every
    key, after quiescence. ``push(message, gradient)`` takes over a gradient in a `gradient_buffer`, and returns False
    for a duplicate.
    """

    def __init__(
        self,
        key_states: Sequence[ShardState],
        optimizer: Optimizer,
        clip: float | None,
        reproducible: bool,
        make: Callable[[int, Any], Array] = np.zeros,
    ):
        self.key_states = {key_state.key.number: key_state for key_state in key_states}
        self.applied = self.updates = 0
        self._optimizer, self._clip, self._reproducible = optimizer, clip, reproducible
        self._pools = {
            number: VectorPool(partial(make, key_state.key.span.size, key_state.piece.weights.dtype))
            for number, key_state in self.key_states.items()
        }

    def begin(self, steps: int) -> None:
        """Continue after `steps` steps, at a quiescent point. Weights, optimizer state and `updates` stay."""
        self.applied = steps

    def gradient_buffer(self, key: int) -> Array:
        return self._pools[key].take()


class AsyncStore(ShardStore):
    """Store that updates the weights with each gradient as it arrives.

    The learning rate is divided by the number of gradients in a step (`parts`), so that together they move the weights
    about as far as one update with their mean.
    """

    def __init__(self, key_states: Sequence[ShardState], *options: Any):
        super().__init__(key_states, *options)
        self._applied_parts: dict[int, set[tuple[int, int]]] = {number: set() for number in self.key_states}
        self._quiesced_at = 0

    def begin(self, steps: int) -> None:
        super().begin(steps)
        self._quiesced_at = steps

    def push(self, message: ServerMessage, gradient: Array) -> bool:
        key, part, applied = message.key, (message.clock, message.number), self._applied_parts[message.key]
        new = message.clock >= self._quiesced_at and part not in applied
        if new:
            piece, clock = self.key_states[key].prepare(gradient), RateClock(message.clock, message.parts)
            self._optimizer.update([piece], self.updates + len(applied), message.factor, clock=clock)
            self.key_states[key].count_missed()
            applied.add(part)
        self._pools[key].give(gradient)
        return new

    def quiesce(self) -> None:
        """Add the updates since the last call to `updates`. Later pushes for the steps so far are duplicates."""
        counts = {len(parts) for parts in self._applied_parts.values()}
        assert len(counts) <= 1, f"numbers of updates differ: {counts}"
        self.updates += sum(counts)
        for parts in self._applied_parts.values():
            parts.clear()
        self._quiesced_at = self.applied


class SyncStore(ShardStore):
    """Store that makes one update per step, once all gradients and the global norm are known."""

    def __init__(self, key_states: Sequence[ShardState], *options: Any):
        super().__init__(key_states, *options)
        self._counters = {number: TreeSum(self._pools[number]) for number in self.key_states}
        self._numbers: dict[int, set[int]] = {number: set() for number in self.key_states}
        self._counts: dict[int, float] = {}
        self._totals: dict[int, Array] = {}

    def push(self, message: ServerMessage, gradient: Array) -> bool:
        """Add a gradient to the step's sum, in canonical order if reproducible. Returns False for a duplicate."""
        key, clock, number = message.key, message.clock, message.number
        assert clock <= self.applied, f"step {clock} was worked on with weights of {self.applied} steps"
        if clock != self.applied or number in self._numbers[key]:
            self._pools[key].give(gradient)
            return False
        order = number if self._reproducible else len(self._numbers[key])
        self._numbers[key].add(number)
        self._counts[number] = message.targets
        self._counters[key].push(TreeNode(0, order), gradient, ours=True)
        return True

    def is_complete(self, parts: int) -> bool:
        return all(len(numbers) == parts for numbers in self._numbers.values())

    def squares(self) -> Array:
        """Complete this server's gradient sums. Returns their block sums of squares, float64, in order of spans.

        Empty without micro-batches. To be called once per step, before `finish`.
        """
        totals = {number: counter.total() for number, counter in self._counters.items()}
        self._totals = {number: total for number, total in totals.items() if total is not None}
        ordered = sorted(self._totals, key=lambda number: self.key_states[number].key.span)
        return np.concatenate([np.zeros(0), *(block_squares(self._totals[number]) for number in ordered)])

    def finish(self, squares: Array) -> float | None:
        """Update the weights, given all servers' block sums of squares. Returns the gradient norm or None.

        The norm is of the gradient per target, None without targets. Then, or if it is not finite, nothing is updated.
        """
        norm, count = None, math.fsum(self._counts.values())
        if count:
            norm, factor = clip_factor(squares, 1 / count, self._clip)
            if np.isfinite(norm):
                pieces = [self.key_states[number].prepare(total) for number, total in self._totals.items()]
                blocks = numbers_of(piece.span for piece in pieces)
                whole, clock = partial(in_order, numbers=blocks), RateClock(min(self.applied, self.updates))
                self._optimizer.update(pieces, self.updates, 1 / count * factor, whole, clock)
                for number in self._totals:
                    self.key_states[number].count_missed()
                self.updates += 1
        for number, numbers in self._numbers.items():
            numbers.clear()
            if number in self._totals:  # also without an update: the next step needs the memory
                self._pools[number].give(self._totals[number])
        self._totals, self._counts = {}, {}
        self.applied += 1
        return norm
