"""What a server has: for every key weights, the optimiser's state, and what was pushed. Knows no MPI.

`Together` adds up the gradients of a step and makes one update of them, as data parallelism does; `Apart` makes an
update of every gradient as it comes. Weights leave from where they are: who updates them while they are being sent,
writes a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from parallel.data_parallel.grad_norm import Everything, blocks_of
from parallel.runtime.tree_sum import Counter, Node, Pool
from parallel.nn.flat_params import BLOCK, Span
from parallel.nn.kernels.storage import narrow
from parallel.nn.operator import Array
from parallel.optim.optimizers import Optimizer, Piece, block_squares, clip_factor
from parallel.optim.lr_schedules import rate_at
from parallel.parameter_server.key_assignment import Key


class Reader(Protocol):
    """Who reads weights: a message under way."""

    def done(self) -> bool:
        """Whether it has read."""


class Cell:
    """A key's piece of the vector, and who reads it just now.

    Parameters
    ----------
    key : Key
    piece : Piece
        Its gradient is replaced before every update.
    """

    def __init__(self, key: Key, piece: Piece):
        self.key, self.piece = key, piece
        self._readers: list[Reader] = []

    @property
    def visible(self) -> Array:
        """The weights as operators see them."""
        return self.piece.weights if self.piece.stored is None else self.piece.stored

    def lend(self, reader: Reader) -> None:
        """Somebody reads `visible` until it is done."""
        self._readers = [other for other in self._readers if not other.done()]
        self._readers.append(reader)

    def prepare(self, gradient: Array) -> Piece:
        """The piece, to be updated with this gradient beside whoever still reads."""
        if not all(reader.done() for reader in self._readers):
            self._leave()
        self._readers = []
        self.piece.gradient = gradient
        return self.piece

    def refresh(self) -> None:
        """The weights were assigned to."""
        if self.piece.stored is not None:
            narrow(self.piece.weights, self.piece.stored.dtype, out=self.piece.stored)

    def _leave(self) -> None:
        if self.piece.stored is None:
            self.piece.weights = self.piece.weights.copy()
        else:
            self.piece.stored = self.piece.stored.copy()


class Pushed(NamedTuple):
    """A gradient on its way into a store.

    Attributes
    ----------
    clock, number, parts : int
        Of which step, which part of it, and of how many.
    targets : int
        What it is summed over.
    factor : float
        What an update of it alone multiplies it with.
    gradient : array
        From the cell's pool, and the store's from now on.
    """

    clock: int
    number: int
    parts: int
    targets: int
    factor: float
    gradient: Array


class Store:
    """What both kinds have in common.

    Parameters
    ----------
    cells : sequence of Cell
        Of one server.
    optimizer : Optimizer
    length : int
        Elements of the whole vector of parameters, on all servers.
    clip : float, optional
        Limit of the gradient's norm.
    reproducible : bool
        Whether gradients are added in canonical order.

    Attributes
    ----------
    applied : int
        Steps whose gradients all are in the weights, as far as that matters.
    updates : int
        Updates that every key has seen, once nobody pushes.
    """

    def __init__(
        self, cells: Sequence[Cell], optimizer: Optimizer, length: int, clip: float | None, reproducible: bool
    ):
        self.cells = {cell.key.number: cell for cell in cells}
        self.applied = self.updates = 0
        self._optimizer, self._length, self._clip, self._reproducible = optimizer, length, clip, reproducible
        self._pools = {number: Pool(_maker(cell)) for number, cell in self.cells.items()}

    def room(self, key: int) -> Array:
        """Memory for a gradient that arrives."""
        return self._pools[key].take()

    def push(self, key: int, pushed: Pushed) -> bool:
        """Take a gradient; False if it was there already."""
        raise NotImplementedError


def _maker(cell: Cell) -> Callable[[], Array]:
    return lambda: np.zeros_like(cell.piece.weights)


class Apart(Store):
    """Every gradient is an update of its own as soon as it is here.

    The rate is that of the step over the number of its parts, so that weights go as far in a step as if all parts had
    been one update.
    """

    def __init__(self, cells, optimizer, length, clip, reproducible):
        super().__init__(cells, replace(optimizer, rate=self._rate), length, clip, reproducible)
        self._scheduled = optimizer.rate
        self._seen: dict[int, set[tuple[int, int]]] = {number: set() for number in self.cells}
        self._now = (0, 1)
        self._settled = 0
        self._made = dict.fromkeys(self.cells, 0)

    def _rate(self, step: int) -> float:
        clock, parts = self._now
        return rate_at(self._scheduled, clock) / parts

    def push(self, key: int, pushed: Pushed) -> bool:
        """Update the key."""
        part = pushed.clock, pushed.number
        new = pushed.clock >= self._settled and part not in self._seen[key]
        if new:
            self._seen[key].add(part)
            self._now = pushed.clock, pushed.parts
            piece = self.cells[key].prepare(pushed.gradient)
            self._optimizer.update([piece], self.updates + self._made[key], pushed.factor)
            self._made[key] += 1
        self._pools[key].give(pushed.gradient)
        return new

    def settle(self) -> None:
        """Nobody pushes just now, but for what comes late and again: all keys have seen all parts of all steps."""
        made = max(self._made.values(), default=0)
        assert all(number == made for number in self._made.values()), f"updates differ: {self._made}"
        self.updates += made
        self._made = dict.fromkeys(self._made, 0)
        for seen in self._seen.values():
            seen.clear()
        self._settled = self.applied


class Together(Store):
    """The gradients of a step are one update, once all are here and the norm of the whole is known."""

    def __init__(self, cells, optimizer, length, clip, reproducible):
        super().__init__(cells, optimizer, length, clip, reproducible)
        self._counters = {number: Counter(self._pools[number]) for number in self.cells}
        self._numbers: dict[int, set[int]] = {number: set() for number in self.cells}
        self._counts: dict[int, int] = {}
        self._totals: dict[int, Array] = {}
        spans = [cell.key.span for cell in cells] or [Span(0, 0)]
        self.span = Span(min(span.start for span in spans), max(span.stop for span in spans))

    def push(self, key: int, pushed: Pushed) -> bool:
        """Add it to what is there: as a leaf of the canonical tree, or as it comes."""
        assert pushed.clock <= self.applied, f"step {pushed.clock} was worked on with weights of {self.applied} steps"
        new = pushed.clock == self.applied and pushed.number not in self._numbers[key]
        if not new:
            self._pools[key].give(pushed.gradient)
            return False
        order = pushed.number if self._reproducible else len(self._numbers[key])
        self._numbers[key].add(pushed.number)
        self._counts[pushed.number] = pushed.targets
        self._counters[key].push(Node(0, order), pushed.gradient, ours=True)
        return True

    def whole(self, parts: int) -> bool:
        """Whether all keys have all parts of the step."""
        return all(len(numbers) == parts for numbers in self._numbers.values())

    def squares(self) -> Array:
        """Block sums of squares of the step's gradient, float64, of this server's span."""
        sums = np.zeros(self.span.size // BLOCK)
        self._totals = {number: counter.total() for number, counter in self._counters.items()}
        for number, total in self._totals.items():
            if total is not None:
                span = self.cells[number].key.span
                sums[blocks_of(Span(span.start - self.span.start, span.stop - self.span.start))] = block_squares(total)
        return sums

    def finish(self, squares: Array, count: int) -> float | None:
        """Make the update from the sums of squares of all blocks of all servers, and the number of targets.

        Returns
        -------
        float or None
            The norm of the gradient; None if there was none. If it is not finite nothing was updated.
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
        """Targets of all parts that are here."""
        return sum(self._counts.values())

    def _update(self, scale: float) -> None:
        pieces = [self.cells[number].prepare(total) for number, total in self._totals.items()]
        everything = Everything([piece.span for piece in pieces])
        self._optimizer.update(pieces, self.updates, scale, everything.gather)
