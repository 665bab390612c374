"""Models and losses for this rank's tokens of sequences, by the sequences' length, made when a batch first has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from collectives.selection.cost_model import BUILT_IN, uniform_network
from parallel.data.sampler import Batch
from parallel.nn.attention import CausalAttention
from parallel.nn.blockwise_attention import BlockwiseAttention
from parallel.nn.operator import ArraySpec, Operator
from parallel.sharding.context.cost_formulas import AttentionWork, fastest
from parallel.sharding.context.divide_model import ALGORITHMS, divide
from parallel.sharding.context.sequence_division import SequenceDivision
from parallel.sharding.context.sequence_parts import LossByParts

AUTO = "auto"
RANK_FLOPS, HEAD_WIDTH = 3e10, 64
"""Operations per second of a rank and width of a head, to weigh computation against messages."""


class LengthModel(NamedTuple):
    """Model and loss for this rank's tokens of sequences of one length. Without a division, for whole samples."""

    model: Operator
    loss: Any
    division: SequenceDivision | None = None
    rank: int = 0

    def part(self, batch: Batch) -> Batch:
        """This rank's tokens of a micro-batch."""
        if self.division is None:
            return batch
        positions = self.division.positions(self.rank)
        return batch._replace(x=batch.x[:, positions], y=batch.y[:, positions])

    def part_spec(self, x: ArraySpec) -> ArraySpec:
        """Spec of this rank's part of an array of inputs or targets."""
        if self.division is None:
            return x
        return ArraySpec((x.shape[0], self.division.size(self.rank), *x.shape[2:]), x.dtype)


class WholeSequences:
    """Model and loss of samples of any shape, with the methods of `ModelsByLength`: nothing is divided."""

    parts_per_rank = 1

    def __init__(self, model: Operator, loss: Any):
        self._whole = LengthModel(model, loss)

    def expect(self, batch: Batch) -> None:
        """No-op: any samples will do."""

    def of_shape(self, shape: tuple[int, ...]) -> LengthModel:
        """The model."""
        return self._whole


class ModelsByLength:
    """Models and losses (`LengthModel`) for any length. They share parameters with `model` and leave it unchanged.

    Parameters
    ----------
    model, loss : of whole sequences, (batch, positions, ...)
    axis : MeshAxis
        Whose ranks share every sequence, in zigzag division.
    parts : int
        See `SequenceDivision`: with a power of two, and "allgather", any number of ranks that divides it has the same
        bits.
    algorithm : str
        Key of `ALGORITHMS`, or "auto" for the one with the least predicted time.
    finish : callable
        Applied to every model and loss that is made.
    multiple : int
        Divisor of every part's number of tokens, for a further division along another axis.

    Raises
    ------
    PlacementError, ValueError
        If an operator needs whole sequences, or the algorithm does not suit the heads.
    """

    def __init__(
        self,
        model: Operator,
        loss: Any,
        axis: Any,
        parts: int,
        algorithm: str = AUTO,
        finish: Callable[[Operator, Any], tuple[Operator, Any]] = lambda model, loss: (model, loss),
        multiple: int = 1,
    ):
        if algorithm != AUTO and algorithm not in ALGORITHMS:
            raise ValueError(f"context: expected {AUTO}, {', '.join(ALGORITHMS)}; found {algorithm!r}")
        self._model, self._loss, self._axis, self._parts = model, loss, axis, parts
        self._algorithm, self._finish, self._multiple = algorithm, finish, multiple
        self.of = lru_cache(maxsize=64)(self._made)

    @property
    def parts_per_rank(self) -> int:
        return self._parts // int(self._axis.size)

    def expect(self, batch: Batch) -> None:
        """Raise ValueError unless inputs and targets of a micro-batch are sequences of one length that can be divided.

        Makes the models of this length.
        """
        x, y = batch.x, batch.y
        if x.ndim < 2 or y.ndim < 2 or x.shape[1] != y.shape[1]:
            expected = f"sequences to divide over {self._axis.name}, axis 1 of inputs and targets"
            raise ValueError(f"micro-batch {batch.number}: expected {expected}; found shapes {x.shape} and {y.shape}")
        division = self.of(x.shape[1]).division
        sizes = [division.part_size(part) for part in range(self._parts)] if division else []
        if any(size % self._multiple for size in sizes):
            expected = (
                f"a multiple of {self._multiple} tokens in every part along {self._axis.name} (sequence_parallel)"
            )
            raise ValueError(f"micro-batch {batch.number}: expected {expected}; found {sizes}, of {x.shape[1]}")

    def of_shape(self, shape: tuple[int, ...]) -> LengthModel:
        """Model for inputs of this shape, (batch, positions, ...)."""
        return self.of(shape[1])

    def _made(self, length: int) -> LengthModel:
        axis, parts = self._axis, self._parts
        division = SequenceDivision("zigzag", length, axis.size, parts if parts > 1 else 0)
        model = divide(self._model, axis, division, self._chosen(division))
        loss = self._loss
        if division.parts_per_rank > 1:
            loss = LossByParts(loss, division.part_slices(axis.rank))
        return LengthModel(*self._finish(model, loss), division, axis.rank)

    def _chosen(self, division: SequenceDivision) -> str:
        """The algorithm. With "auto" the one predicted to be fastest in most attention layers."""
        if self._algorithm != AUTO:
            return self._algorithm
        nodes = None if self._axis.comm is None else self._axis.comm.nodes
        network = uniform_network(nodes, BUILT_IN) or BUILT_IN.network
        names = [fastest(work, network, RANK_FLOPS) for work in attention_layers(self._model, division)]
        return max(names, key=names.count) if names else "allgather"


def attention_layers(model: Operator, division: SequenceDivision) -> list[AttentionWork]:
    """Work of every attention layer of a model for one sequence, with heads of `HEAD_WIDTH`."""
    found = []
    for _, operator in model.walk():
        if isinstance(operator, CausalAttention):
            found.append(AttentionWork(division, 1, operator.heads, operator.heads, HEAD_WIDTH))
        elif isinstance(operator, BlockwiseAttention):
            found.append(AttentionWork(division, 1, *operator.heads, HEAD_WIDTH, operator.mask))
    return found
