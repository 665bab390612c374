"""Mixture-of-Depths of divided sequences: choice and results equal those for whole sequences.

A token's gate depends on itself only. Ranks exchange the gates and make the same choice. The chosen tokens may all be
of one rank, so they are divided again: each rank computes the block for an equal part of them, as if these were the
sequences. Their results return to the ranks that have the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect
from parallel.nn.depths import MixtureOfDepths
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, PassMode
from parallel.nn.rewrite import inherit
from parallel.runtime.vector_memory import to_host
from parallel.sharding.context.messages import allgather_positions, alltoall
from parallel.sharding.context.sequence_division import SequenceDivision
from quant.types import Array


class DividedDepthValues(NamedTuple):
    """Saved values: chosen positions of whole sequences, and tokens, gates and changes of this rank's part of them."""

    x: Array
    chosen: Array
    tokens: Array
    gates: Array
    change: Array
    of_block: Any
    scale: float


class ChosenTokens:
    """Exchange of chosen tokens between the ranks that hold them and the ranks that compute them. Collective.

    Parameters
    ----------
    axis : MeshAxis
    division : SequenceDivision
        Of the sequences: the rank of every token.
    chosen : numpy.ndarray
        Positions (sequences, tokens), ascending, equal on all ranks.
    """

    def __init__(self, axis: Any, division: SequenceDivision, chosen: np.ndarray):
        self._axis, self._sequences = axis, len(chosen)
        self.division = replace(division, length=chosen.shape[1])
        owners, places = np.empty((2, division.length), np.int64)
        for rank in range(axis.size):
            positions = division.positions(rank)
            owners[positions], places[positions] = rank, np.arange(len(positions))
        rows = places[chosen] + division.size(axis.rank) * np.arange(len(chosen))[:, None]
        of_user = [self.division.positions(rank) for rank in range(axis.size)]
        self._sent = [rows[:, at][owners[chosen[:, at]] == axis.rank] for at in of_user]
        here = owners[chosen[:, of_user[axis.rank]]].reshape(-1)
        self._received = [np.flatnonzero(here == rank) for rank in range(axis.size)]

    @property
    def rows(self) -> np.ndarray:
        """Numbers of the chosen ones among this rank's tokens of all sequences."""
        return np.concatenate(self._sent)

    def spread(self, x: Array) -> Array:
        """This rank's part of the chosen tokens, (sequences, tokens, width), of all ranks' x of the same form."""
        xp, width = kernels.array_namespace(x), x.shape[-1]
        rows = x.reshape(-1, width)
        shapes = [(len(slots), width) for slots in self._received]
        arrived = alltoall(self._axis, [rows[xp.asarray(numbers)] for numbers in self._sent], shapes)
        y = xp.empty((self._sequences * self.division.size(self._axis.rank), width), x.dtype)
        for slots, part in zip(self._received, arrived):
            y[xp.asarray(slots)] = part
        return y.reshape(self._sequences, self.division.size(self._axis.rank), width)

    def collect(self, y: Array) -> Array:
        """Values of the tokens at `rows`, (number, width), from the parts y of all ranks."""
        xp, width = kernels.array_namespace(y), y.shape[-1]
        flat = y.reshape(-1, width)
        shapes = [(len(numbers), width) for numbers in self._sent]
        sent = [flat[xp.asarray(slots)] for slots in self._received]
        return xp.concatenate(alltoall(self._axis, sent, shapes))


class DividedDepths(MixtureOfDepths):
    """Mixture-of-Depths for this rank's tokens of every sequence. Shares the parameters of `whole`.

    Collective along the axis, in both passes. The predictor's loss covers this rank's tokens: it is a term of a sum
    over the axis, like the gradients of parameters.

    Parameters
    ----------
    whole : MixtureOfDepths
    axis : MeshAxis
    division : SequenceDivision
    block_of : callable
        Number of chosen tokens -> block for a divided sequence of that length.
    """

    mixes = (-1,)
    exchanges = True
    fixed = ("fraction", "width")

    def __init__(
        self, whole: MixtureOfDepths, axis: Any, division: SequenceDivision, block_of: Callable[[int], Operator]
    ):
        inherit(self, whole)
        self.axis, self.division, self._block_of = axis, division, lru_cache(maxsize=64)(block_of)
        self.block = block_of(self.count(division.length))

    def _expect(self, x: Any) -> None:
        size = self.division.size(self.axis.rank)
        fits = len(x.shape) == 3 and x.shape[1:] == (size, self.width)
        expect(fits, self, f"an array of shape (batch, {size}, {self.width})", x)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        self._expect(x)
        if not run.training:
            return self._used(x, run), ()
        gates = self._gates(x)
        count = self.count(self.division.length)
        mask = kernels.top_k(gates, count)
        positions = kernels.array_namespace(x).asarray(self.division.positions(self.axis.rank))
        self._note(x, mask[:, positions], run)
        return self._applied(x, gates, _positions(mask, count), self.block, run)

    def _gates(self, x: Array) -> Array:
        """Gates of all tokens, (sequences, length)."""
        mine = (kernels.widen(x) @ kernels.widen(self.weight.data))[..., 0]
        return allgather_positions(self.axis, self.division, mine)

    def _applied(self, x: Array, gates: Array, chosen: Array, block: Operator, run: PassMode) -> tuple[Array, Any]:
        """Result with the block applied at `chosen`, positions (sequences, tokens), and saved values."""
        xp = kernels.array_namespace(x)
        exchange = ChosenTokens(self.axis, self.division, to_host(chosen))
        tokens = exchange.spread(x)
        mine = chosen[:, xp.asarray(exchange.division.positions(self.axis.rank))]
        own_gates = xp.take_along_axis(gates, mine, axis=1)[..., None]
        result, of_block = block.forward(tokens, run)
        change = kernels.widen(result) - kernels.widen(tokens)
        y = xp.array(x).reshape(-1, self.width)
        arrived = exchange.collect(kernels.narrow(kernels.widen(tokens) + own_gates * change, x.dtype))
        y[xp.asarray(exchange.rows)] = arrived
        return y.reshape(x.shape), DividedDepthValues(x, chosen, tokens, own_gates, change, of_block, run.scale)

    def _used(self, x: Array, run: PassMode) -> Array:
        xp, gates, rows = kernels.array_namespace(x), self._gates(x), []
        wanted = allgather_positions(self.axis, self.division, (self._logits(x) > 0).astype(np.uint8)) > 0
        for one, alone in self._alone(x, run):
            count = int(wanted[one].sum())
            chosen = _positions(wanted[one], count)
            rows.append(self._applied(x[one], gates[one], chosen, self._block_of(count), alone)[0])
        return xp.concatenate([x[:0], *rows])

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        xp, v = kernels.array_namespace(dy), saved
        exchange = ChosenTokens(self.axis, self.division, to_host(v.chosen))
        upper = kernels.widen(exchange.spread(dy))
        dgates = (upper * v.change).sum(axis=-1, keepdims=True)
        dchange = v.gates * upper
        dtokens = kernels.widen(self.block.backward(kernels.narrow(dchange, dy.dtype), v.of_block, grads))
        dtokens = dtokens - dchange + dgates * kernels.widen(self.weight.data).reshape(-1)
        tokens, rows = kernels.widen(v.tokens.reshape(-1, self.width)), xp.asarray(exchange.rows)
        dx = xp.array(kernels.widen(dy)).reshape(-1, self.width)
        dx[rows] += exchange.collect(dtokens)
        grads(self.weight, lambda out: kernels.matmul(tokens.T, dgates.reshape(-1, 1), out=out))
        self._give_predictor_gradient(v.x, rows, v.scale, grads)
        return kernels.narrow(dx, dy.dtype).reshape(dy.shape)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline of a pass in training. Messages are as large as if all chosen tokens came from other ranks."""
        self._expect(x)
        batch, count, wide = x.shape[0], self.count(self.division.length), kernels.wide(x.dtype)
        size = replace(self.division, length=count).size(self.axis.rank)
        tokens = ArraySpec((batch, size, self.width), x.dtype)
        block = self.block.outline(tokens)
        gates, change = ArraySpec((batch, size, 1), wide), ArraySpec(tokens.shape, wide)
        saved = x, ArraySpec((batch, count), np.dtype(np.int64)), tokens, gates, change, block.saved
        work = block.work + (elements(tokens) * 8 + elements(x) * 2) * wide.itemsize
        return OperatorOutline(ArraySpec(*x), saved, block.flops + 4 * elements(x), work, block.recomputed)


def _positions(mask: Array, count: int) -> Array:
    """Positions (sequences, count) where a mask (sequences, length) has `count` ones in every sequence."""
    sequences, length = mask.shape
    return (kernels.array_namespace(mask).flatnonzero(mask) % max(length, 1)).reshape(sequences, count)
