"""Sharded optimizer: gradient norm, clipping and update of this rank's shards.

A shard is a run of the flat vector whose gradients are summed over some of the ranks; a rank of a pipeline has several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from parallel.checkpoint.tensor_slices import TensorSlice, tensor_slices
from parallel.engine.data_parallel.grad_bucket import GradBucket
from parallel.engine.data_parallel.layouts import DataParallelLayout
from parallel.engine.data_parallel.logical_blocks import LogicalBlocks, tensors_of
from parallel.engine.data_parallel.param_store import ReplicatedParams, ShardedParams
from parallel.engine.data_parallel.run_context import RunContext
from parallel.nn.flat_params import BLOCK, ParamSpan, Span
from parallel.nn.kernels.storage import array_namespace, narrow, widen
from parallel.nn.operator import Parameter
from parallel.nn.placement import Shard
from parallel.optim.grad_norm import block_squares, clip_factor
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.optim.param_groups import MissedUpdates, RateClock
from parallel.runtime.consistency_check import NOTHING, StepFailed, raise_step_failed
from quant.types import Array


class ParamShard(NamedTuple):
    """Range of the flat parameter vector (all, or a pipeline chunk): gradient sink, storage, context of its ranks.

    `spans` are those that each rank adds to norms and writes to checkpoints.
    """

    context: RunContext
    gradients: Any
    weights: ReplicatedParams | ShardedParams
    spans: Sequence[Sequence[Span]]

    @classmethod
    def make(cls, context: RunContext, layout: DataParallelLayout) -> ParamShard:
        gradients = layout.gradients(context)
        return cls(context, gradients, layout.weights(context, gradients), layout.spans(context, gradients))

    @property
    def mine(self) -> Sequence[Span]:
        return self.spans[self.context.plan.rank]

    @property
    def copied(self) -> list[ParamSpan]:
        """Parameters that all ranks of the context have."""
        return list(self.context.flat.places) if self.weights.replicated else []

    def close(self) -> None:
        """Free requests. Parameters lose their values."""
        self.gradients.close()
        self.weights.close()
        for place in self.context.flat.places:
            place.parameter.release()


def copies(parts: Sequence[ParamShard], axis: Any) -> list[tuple[Communicator, list[ParamSpan]]]:
    """Ranks with parameters that all of them have. `axis` has ranks with other shards of some, or is None."""
    found = [(part.context.comm, part.copied) for part in parts if part.weights.replicated]
    if axis is not None and axis.size > 1:
        held = [place for part in parts for place in part.copied]
        found.append((axis.comm, [place for place in held if not isinstance(place.parameter.placement, Shard)]))
    return found


class ShardedOptimizer:
    """Optimizer for this rank's shards: gradient norm over all ranks, clipping, loss scaling, update.

    `spans` are those of every rank; together they make up the vector. `seed` is that of initial values, `clip` the
    limit of the gradient norm. `blocks` orders the blocks of all shards of a model that is cut. `missed` are counted by
    the engine.
    """

    def __init__(
        self,
        context: RunContext,
        parts: Sequence[ParamShard],
        spans: Sequence[Sequence[Span]],
        optimizer: Optimizer,
        seed: int,
        clip: float | None,
        blocks: LogicalBlocks | None = None,
    ):
        self._blocks, self.missed = blocks, MissedUpdates()
        self._in_users_hands: set[Parameter] = set()
        self._context, self._parts, self._optimizer, self._clip = context, parts, optimizer, clip
        recipe = context.plan.precision
        self.scaling, self._scaled = recipe.loss_scale(), recipe.scaled
        self.pieces = [piece for part in parts for piece in self._pieces_of(part, seed)]
        self._mine = [span for part in parts for span in part.mine]
        order = numbers_of(span for some in spans for span in some)
        self._order = slice(len(order)) if (order == np.arange(len(order))).all() else order
        self._counts = [sum(span.size for span in some) // BLOCK for some in spans]
        self._arriving = context.memory.on_host("buffers", len(order), np.float64)
        self._held = numbers_of(piece.span for piece in self.pieces)
        whole = len(self._held) * BLOCK == context.flat.length
        self._whole = bool(context.comm.allreduce(whole, MPI.MIN))  # on all ranks
        place = {number: at for at, number in enumerate(self._held.tolist())}
        self._chosen = np.array([place[number] for number in numbers_of(self._mine).tolist()], np.int64)

    def _pieces_of(self, part: ParamShard, seed: int) -> Iterator[OptimizerSpan]:
        """Yield the spans of a shard that this rank updates, with initial weights and new optimizer state."""
        memory, wide, flat, own = part.context.memory, part.context.wide, part.context.flat, part.weights.own
        size = sum(span.size for span, _ in own)
        vectors = {name: memory.private("optimizer", size, wide) for name in self._optimizer.states()}
        master = memory.private("optimizer", size, wide) if part.context.plan.precision.master else None
        at = 0
        for (span, stored), (_, gradient) in zip(own, part.gradients.own):
            here = slice(at, at + span.size)
            at += span.size
            weights = stored if master is None else master[here]
            first = weights if memory.xp is np else np.empty(span.size, wide)  # initialisers write NumPy arrays
            flat.initialise(first, seed, span)
            if first is not weights:
                weights[...] = memory.xp.asarray(first)
            state = {name: vector[here] for name, vector in vectors.items()}
            narrow_weights = None if master is None else stored
            yield OptimizerSpan(span, weights, gradient, state, flat.places, narrow_weights, self.missed)

    def begin(self) -> None:
        """Begin a step, in which gradients of this rank that are not finite are noted."""
        for bucket in self._buckets():
            bucket.square = 0.0

    def _buckets(self) -> list[GradBucket]:
        return [reducer.bucket for part in self._parts for reducer in part.gradients.reducers]

    def norm(self, count: float, step: int, everyone: Communicator) -> tuple[float, float, bool]:
        """Adapt the loss scale. Return (global gradient norm, factor for `update`, True if finite). Collective.

        Raises
        ------
        StepFailed
            On all ranks, `everyone`, if the gradient is not finite, unless a smaller loss scale may help; or if one of
            them has no memory for the norm or the update.
        """
        with self._context.recorder("compute", "norm"):
            mine, problem = self._squares_and_room()
            squares = self._allgather(mine)
            if self._blocks is not None:
                squares = self._blocks.gather(squares)
        factor = 1 / (count * self.scaling.value)
        norm, clip = clip_factor(squares, factor, self._clip)
        finite = math.isfinite(norm)
        if not finite:
            raise_step_failed(everyone, problem)
        if not finite and not self._scaled:
            tensors = tensors_of(self._context.flat) if self._blocks is None else self._blocks.whole
            ends = list(accumulate(tensor.length // BLOCK for tensor in tensors))
            parts = zip(tensors, np.split(squares, ends[:-1]))
            odd = ", ".join(dict.fromkeys(tensor.name for tensor, part in parts if not np.isfinite(part).all()))
            what = f"the gradient of {odd} is" if odd else "the norm of the gradient is"
            own = everyone.allgather(any(not math.isfinite(bucket.square) for bucket in self._buckets()))
            ranks = ", ".join(str(rank) for rank, is_odd in enumerate(own) if is_odd and len(own) > 1)
            raise StepFailed(f"{NOTHING}; {what} not finite in step {step}{ranks and f' (rank {ranks})'}")
        try:
            self.scaling.update(finite)
        except FloatingPointError as error:  # all ranks have the same norm
            raise StepFailed(f"{NOTHING}; {error}, in step {step}") from error
        return norm if finite else math.inf, factor * clip, finite

    def update(self, updates: int, factor: float, clock: RateClock) -> None:
        """Update the weights with gradient x `factor`. `updates` is the number of updates made before. Collective."""
        with self._context.recorder("compute", "update"):
            self._optimizer.update(self.pieces, updates, factor, self._gather, clock)
        self.publish()

    def publish(self) -> None:
        for part in self._parts:
            part.weights.allgather_updates()

    def _squares(self) -> np.ndarray:
        held = [own for part in self._parts for own in part.gradients.own]
        sums = [block_squares(run) for span in self._mine for run in _runs(held, span)]
        return sums[0] if len(sums) == 1 else np.concatenate([np.zeros(0), *sums])

    def _squares_and_room(self) -> tuple[np.ndarray, Exception | None]:
        """Sums of squares once there is room for the update, else NaN, from which all ranks learn it. And the error."""
        try:
            self._optimizer.reserve(self.pieces)
            return self._squares(), None
        except MemoryError as error:
            return np.full(sum(span.size for span in self._mine) // BLOCK, np.nan), error

    def _gather(self, of_pieces: np.ndarray) -> np.ndarray:
        if self._whole:
            return in_order(of_pieces, self._held)
        return self._allgather(of_pieces[self._chosen])

    def _allgather(self, mine: np.ndarray) -> np.ndarray:
        """All-gather a float64 value per block from each rank's spans. Returns them in the order of the flat vector."""
        if len(self._counts) == 1:  # no copy through `_arriving`, during which a GPU would be idle
            return in_order(mine, self._order)
        with self._context.recorder("communication", "gather block sums"):
            self._context.comm.Allgatherv(np.ascontiguousarray(mine, np.float64), [self._arriving, self._counts])
        return in_order(self._arriving, self._order)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Context of passes, in which operators read weights. Changes of weights before it are the user's."""
        self.take_changes()
        try:
            yield
        finally:
            for parameter in self._narrow_parameters():
                parameter.was_read = False

    def take_changes(self) -> None:
        """Set master weights to the weights that a user has changed since the last update.

        A user who has read `Parameter.data` once may change its elements at any time later.
        """
        self._in_users_hands |= {parameter for parameter in self._narrow_parameters() if parameter.was_read}
        for piece in self.pieces if self._in_users_hands else ():
            if (stored := piece.stored) is None:
                continue
            for start, stop, place in piece.tensors:
                if place.parameter in self._in_users_hands:
                    _take_changed(stored[start:stop], piece.weights[start:stop])

    def _narrow_parameters(self) -> Iterator[Parameter]:
        """Parameters that are stored apart from their master weights."""
        return (run.place.parameter for piece in self.pieces if piece.stored is not None for run in piece.tensors)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        self.take_changes()
        yield from tensor_slices(self.pieces, self._mine)

    def gradient_slices(self) -> Iterator[TensorSlice]:
        """Slices of the gradients of the last step, with the names of the weights: sums, times the loss scale."""
        pieces = [OptimizerSpan(one.span, one.gradient, one.gradient, {}, one.places) for one in self.pieces]
        yield from tensor_slices(pieces, self._mine)

    def refresh(self) -> None:
        """Publish master weights that were assigned through `tensor_slices`, as after a restore. Collective."""
        for piece in self.pieces:
            if piece.stored is not None:
                narrow(piece.weights, piece.stored.dtype, out=piece.stored)
        self.publish()


def _take_changed(stored: Array, master: Array) -> None:
    """Set the elements of `master` that are not rounded to those of `stored`, of a half type, to these."""
    values = widen(stored)
    changed = values != widen(narrow(master, stored.dtype))
    master[...] = array_namespace(master).where(changed, values, master)


def numbers_of(spans: Iterable[Span]) -> np.ndarray:
    """Block indices covered by the spans, one span after another, int64.

    >>> numbers_of([Span(512, 1024), Span(0, 256)]).tolist()
    [2, 3, 0]
    """
    ranges = [np.arange(span.start // BLOCK, span.stop // BLOCK) for span in spans]
    return np.concatenate([np.zeros(0, np.int64), *ranges])


def in_order(values: np.ndarray, numbers: np.ndarray | slice) -> np.ndarray:
    """Reorder a value per block into the order of the flat vector: ``result[numbers] = values``."""
    whole = np.empty_like(values)
    whole[numbers] = values
    return whole


def _runs(held: Sequence[tuple[Span, Array]], wanted: Span) -> Iterator[Array]:
    """Elements of the span `wanted`, as views of the arrays in `held`, each of which holds the elements of its span."""
    for span, array in sorted(held, key=lambda one: one[0]):
        start, stop = max(span.start, wanted.start), min(span.stop, wanted.stop)
        if start < stop:
            yield array[start - span.start : stop - span.start]
