"""State of a server: weights, optimizer state and pushed gradients of every key. No MPI.

`SyncStore` adds the gradients of a step and makes one update of them, as in data parallelism; `AsyncStore` makes an
update of every gradient. Weights are sent from where they lie; an update during a send writes to a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from parallel.data_parallel.grad_norm import AllBlocks, blocks_of
from parallel.nn.flat_params import BLOCK, Span
from parallel.nn.kernels.storage import narrow
from parallel.optim.lr_schedules import rate_at
from parallel.optim.optimizers import Optimizer, OptimizerSpan, block_squares, clip_factor
from parallel.parameter_server.key_assignment import ServerKey
from parallel.runtime.tree_sum import TreeNode, TreeSum, VectorPool
from quant.types import Array


class PendingRead(Protocol):
    """Message in flight that reads weights."""

    def done(self) -> bool:
        """True once the message has left."""


class ShardState:
    """State of one key, and the messages that are reading it.

    Parameters
    ----------
    key : ServerKey
    piece : OptimizerSpan
        Its gradient is replaced before every update.
    """

    def __init__(self, key: ServerKey, piece: OptimizerSpan):
        self.key, self.piece = key, piece
        self._readers: list[PendingRead] = []

    @property
    def visible(self) -> Array:
        """Weights in the operators' dtype."""
        return self.piece.weights if self.piece.stored is None else self.piece.stored

    def lend(self, reader: PendingRead) -> None:
        """Register a message that reads `visible` until it is done."""
        self._readers = [other for other in self._readers if not other.done()]
        self._readers.append(reader)

    def prepare(self, gradient: Array) -> OptimizerSpan:
        """The piece with this gradient, ready for an update; copied first if a message still reads it."""
        if not all(reader.done() for reader in self._readers):
            self._leave()
        self._readers = []
        self.piece.gradient = gradient
        return self.piece

    def refresh(self) -> None:
        """Update `visible` after an assignment to the weights."""
        if self.piece.stored is not None:
            narrow(self.piece.weights, self.piece.stored.dtype, out=self.piece.stored)

    def _leave(self) -> None:
        if self.piece.stored is None:
            self.piece.weights = self.piece.weights.copy()
        else:
            self.piece.stored = self.piece.stored.copy()


class PushedGradient(NamedTuple):
    """Gradient passed to a store.

    Attributes
    ----------
    clock, number, parts : int
        Step, part, and number of parts of the step.
    targets : int
        Number of targets of the part.
    factor : float
        Scale of an asynchronous update.
    gradient : array
        From the key's pool; owned by the store from now on.
    """

    clock: int
    number: int
    parts: int
    targets: int
    factor: float
    gradient: Array


class ShardStore:
    """Common part of both stores.

    Parameters
    ----------
    cells : sequence of ShardState
        Keys of one server.
    optimizer : Optimizer
    length : int
        Length of the whole parameter vector, over all servers.
    clip : float, optional
        Limit of the gradient's norm.
    reproducible : bool
        True to add gradients in canonical order.
    make : callable (size, dtype) -> array
        Allocator of gradients.

    Attributes
    ----------
    applied : int
        Number of steps whose gradients are all in the weights.
    updates : int
        Number of updates of every key, after quiescence.
    """

    def __init__(
        self,
        key_states: Sequence[ShardState],
        optimizer: Optimizer,
        length: int,
        clip: float | None,
        reproducible: bool,
        make: Callable[[int, Any], Array] = np.zeros,
    ):
        self.key_states = {key_state.key.number: key_state for key_state in key_states}
        self.applied = self.updates = 0
        self._optimizer, self._length, self._clip, self._reproducible = optimizer, length, clip, reproducible
        self._pools = {
            number: VectorPool(partial(make, key_state.key.span.size, key_state.piece.weights.dtype))
            for number, key_state in self.key_states.items()
        }

    def gradient_buffer(self, key: int) -> Array:
        """Memory for a gradient that arrives."""
        return self._pools[key].take()

    def push(self, key: int, pushed: PushedGradient) -> bool:
        """Take a gradient; returns False for a duplicate."""
        raise NotImplementedError


class AsyncStore(ShardStore):
    """Store that makes an update of every gradient at once.

    The learning rate of a step is divided by its number of parts, so that a step moves the weights as far as one
    update.
    """

    def __init__(self, key_states, optimizer, length, clip, reproducible, make=np.zeros):
        super().__init__(key_states, replace(optimizer, rate=self._rate), length, clip, reproducible, make)
        self._scheduled = optimizer.rate
        self._seen: dict[int, set[tuple[int, int]]] = {number: set() for number in self.key_states}
        self._now = (0, 1)
        self._quiesced_at = 0
        self._made = dict.fromkeys(self.key_states, 0)

    def _rate(self, step: int) -> float:
        clock, parts = self._now
        return rate_at(self._scheduled, clock) / parts

    def push(self, key: int, pushed: PushedGradient) -> bool:
        part = pushed.clock, pushed.number
        new = pushed.clock >= self._quiesced_at and part not in self._seen[key]
        if new:
            self._seen[key].add(part)
            self._now = pushed.clock, pushed.parts
            piece = self.key_states[key].prepare(pushed.gradient)
            self._optimizer.update([piece], self.updates + self._made[key], pushed.factor)
            self._made[key] += 1
        self._pools[key].give(pushed.gradient)
        return new

    def quiesce(self) -> None:
        """Mark that all keys have seen all parts of all steps; later pushes are duplicates."""
        made = max(self._made.values(), default=0)
        assert all(number == made for number in self._made.values()), f"updates differ: {self._made}"
        self.updates += made
        self._made = dict.fromkeys(self._made, 0)
        for seen in self._seen.values():
            seen.clear()
        self._quiesced_at = self.applied


class SyncStore(ShardStore):
    """Store that makes one update per step, once all gradients and the global norm are known."""

    def __init__(self, key_states, optimizer, length, clip, reproducible, make=np.zeros):
        super().__init__(key_states, optimizer, length, clip, reproducible, make)
        self._counters = {number: TreeSum(self._pools[number]) for number in self.key_states}
        self._numbers: dict[int, set[int]] = {number: set() for number in self.key_states}
        self._counts: dict[int, int] = {}
        self._totals: dict[int, Array] = {}
        spans = [key_state.key.span for key_state in key_states] or [Span(0, 0)]
        self.span = Span(min(span.start for span in spans), max(span.stop for span in spans))

    def push(self, key: int, pushed: PushedGradient) -> bool:
        """Add a gradient: as a leaf of the canonical tree, or in order of arrival."""
        assert pushed.clock <= self.applied, f"step {pushed.clock} was worked on with weights of {self.applied} steps"
        new = pushed.clock == self.applied and pushed.number not in self._numbers[key]
        if not new:
            self._pools[key].give(pushed.gradient)
            return False
        order = pushed.number if self._reproducible else len(self._numbers[key])
        self._numbers[key].add(pushed.number)
        self._counts[pushed.number] = pushed.targets
        self._counters[key].push(TreeNode(0, order), pushed.gradient, ours=True)
        return True

    def whole(self, parts: int) -> bool:
        """True if all keys have all parts of the step."""
        return all(len(numbers) == parts for numbers in self._numbers.values())

    def squares(self) -> Array:
        """Block sums of squares of the step's gradient, float64, of this server's span."""
        sums = np.zeros(self.span.size // BLOCK)
        self._totals = {number: counter.total() for number, counter in self._counters.items()}
        for number, total in self._totals.items():
            if total is not None:
                span = self.key_states[number].key.span
                sums[blocks_of(Span(span.start - self.span.start, span.stop - self.span.start))] = block_squares(total)
        return sums

    def finish(self, squares: Array, count: int) -> float | None:
        """Make the update, from the block sums of squares of all servers and the number of targets.

        Returns
        -------
        float or None
            Norm of the gradient; None without targets. Nothing is updated if it is not finite.
        """
        norm = None
        if count:
            norm, factor = clip_factor(squares, 1 / count, self._clip)
            if np.isfinite(norm):
                self._update(1 / count * factor)
                self.updates += 1
        for number, total in self._totals.items():
            if total is not None:
                self._pools[number].give(total)
            self._numbers[number].clear()
        self._totals, self._counts = {}, {}
        self.applied += 1
        return norm

    @property
    def count(self) -> int:
        """Number of targets of the received parts."""
        return sum(self._counts.values())

    def _update(self, scale: float) -> None:
        pieces = [self.key_states[number].prepare(total) for number, total in self._totals.items()]
        everything = AllBlocks([piece.span for piece in pieces])
        self._optimizer.update(pieces, self.updates, scale, everything.gather)
