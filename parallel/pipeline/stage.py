"""Computations of a stage: forwards and backwards of its units on the micro-batches of its pipeline."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel.data_parallel.grad_bucket import of
from parallel.data_parallel.sharded_optimizer import ParamShard
from parallel.engine.microbatch_pass import Measure, MicrobatchPass, empty_pass
from parallel.engine.step_sync import Losses
from parallel.nn.operator import ArraySpec, Operator, Parameter, PassMode
from parallel.pipeline.param_division import SharedParamGroup
from parallel.pipeline.schedule.actions import Kind
from parallel.pipeline.schedule.lowering import COMPUTED
from quant.types import Array

Compute = Callable[[Array], object]


class StageChunk:
    """Part of the model on this stage; also the sink for the gradients of its parameters.

    `number` is that of the part; `units` are by number in the model, ascending; `shares` are this rank's shards of its
    weights.
    """

    def __init__(
        self, number: int, parts: int, units: dict[int, Operator], shares: Sequence[tuple[SharedParamGroup, ParamShard]]
    ):
        self.number, self.units, self.shares = number, units, shares
        self.first, self.last = number == 0, number == parts - 1
        self._sinks = {id(tensor.parameter): part.gradients for group, part in shares for tensor in group.tensors}
        ordered = [group for group, part in shares if part.context.plan.reproducible and len(group.parts) > 1]
        self._once = {id(tensor.parameter) for group in ordered for tensor in group.tensors}
        self._come: set[int] = set()

    def begin(self, kinds: Iterable[Kind]) -> None:
        """Announce the kinds of the chunk's actions to come, whose order is that in which sharded weights are used."""
        path = [unit for kind in kinds if kind in COMPUTED for unit in self._visits(kind)]
        for _, part in self.shares:
            part.weights.begin(path)

    def _visits(self, kind: Kind) -> Iterable[int]:
        return self.units if kind == "F" else reversed(self.units)

    def unshard(self) -> None:
        """Make the weights of the next unit available (`ShardedParams.unshard`)."""
        for _, part in self.shares:
            part.weights.unshard()

    def reshard(self) -> None:
        for _, part in self.shares:
            part.weights.reshard()

    def begin_backward(self, turn: int, number: int | None) -> None:
        self._come.clear()
        for group, part in self.shares:
            part.gradients.begin_backward(turn, None if number is None else group.leaf(number, self.number))

    def __call__(self, parameter: Parameter, compute: Compute) -> None:
        """Accumulate the gradient of a parameter, which ``compute(array)`` writes.

        Raises ValueError if a shared parameter of a reproducible training gets two gradients in one backward: the order
        of additions would differ from that of a single rank (`parallel.pipeline.param_division`).
        """
        if id(parameter) in self._once & self._come:
            raise ValueError(
                f"reproducible: {parameter.name} belongs to several parts of the model, and its gradient came twice in "
                "one backward; in one order for any layout each part has it once"
            )
        self._come.add(id(parameter))
        of(self._sinks, parameter)(parameter, compute)

    def left(self, unit: int) -> None:
        for _, part in self.shares:
            part.gradients.left(unit)

    def end_backward(self) -> None:
        for _, part in self.shares:
            part.gradients.end_backward()


class DeferredGradients:
    """Gradient sink that keeps the functions that compute weight gradients, for a later W action.

    `units` are those that the backward has left, in order, with the gradients of each.
    """

    def __init__(self) -> None:
        self.units: list[tuple[int, list[tuple[Parameter, Compute]]]] = []
        self._here: list[tuple[Parameter, Compute]] = []

    def __call__(self, parameter: Parameter, compute: Compute) -> None:
        self._here.append((parameter, compute))

    def left(self, unit: int) -> None:
        self.units.append((unit, self._here))
        self._here = []


@dataclass(frozen=True)
class Microbatch:
    """Micro-batch of a pipeline, numbered in the step over all pipelines; `x` and `y` are in the model's dtypes.

    Without a number it is empty: one that other replicas have, of whose exchanges this rank makes its part.
    """

    number: int | None
    x: Array
    y: Array
    run: PassMode
    output_specs: Sequence[ArraySpec]  # of each part of the model


def empty_microbatch(parts: int) -> Microbatch:
    return Microbatch(None, None, None, PassMode(), [ArraySpec((0,), np.dtype(np.uint8))] * parts)


class StageEvaluator:
    """Computations of a stage in an evaluation: forwards only (`runner.StageWork`).

    `progress` is called between units to progress messages; `measure` is a function of scores and targets. `losses` are
    those computed here, by number of the micro-batch. After the first error, `problem`, nothing is computed.
    """

    def __init__(
        self,
        chunks: Mapping[int, StageChunk],
        microbatches: Sequence[Microbatch],
        loss: Any,
        progress: Callable[[], None],
        measure: Measure | None = None,
    ):
        self._chunks, self._microbatches, self._loss = chunks, microbatches, loss
        self._progress, self._measure = progress, measure
        self.losses: Losses = []
        self.measured = 0.0
        self.problem: Exception | None = None

    def output_spec(self, part: int, microbatch: int) -> ArraySpec:
        return self._microbatches[microbatch].output_specs[part]

    def forward(self, chunk: int, microbatch: int, x: Array) -> Array:
        return self._through(self._chunks[chunk], microbatch, x, keep=False)[1]

    def backward(self, chunk: int, microbatch: int, dy: Array, whole: bool) -> Array:
        raise NotImplementedError

    def weights(self, chunk: int, microbatch: int) -> None:
        raise NotImplementedError

    def update(self, chunk: int, number: int) -> None:
        raise NotImplementedError

    def _through(self, chunk: StageChunk, microbatch: int, x: Array, keep: bool) -> tuple[MicrobatchPass, Array]:
        """Forward of a chunk on a micro-batch; returns the pass (arrays for a backward if `keep`) and output or None.

        The output is None on the last part of the model and after an error.
        """
        one = self._microbatches[microbatch]
        x, y = one.x if chunk.first else x, one.y if chunk.last else None
        pass_ = empty_pass() if self.problem else MicrobatchPass(x, y, one.run, self._loss)
        for unit in chunk.units.values():
            chunk.unshard()
            pass_.forward(unit)
            chunk.reshard()
            if not keep:
                pass_.saved.clear()
            self._progress()
        if chunk.last and one.number is not None:
            pass_.score(self._measure)
            self.measured += pass_.measured
            self.losses.append((one.number, pass_.total))
        self.problem = self.problem or pass_.problem
        output = None if chunk.last else self._fitting(pass_.give(), chunk.number, microbatch)
        return pass_, output

    def _fitting(self, array: Array, part: int, microbatch: int) -> Array:
        """The array if it has the shape and dtype of the part's outline; else None, and `problem` is set."""
        wanted = self.output_spec(part, microbatch)
        if array is None or (array.shape, array.dtype) == (wanted.shape, wanted.dtype):
            return array
        found = f"{array.dtype} of shape {array.shape}"
        outline = f"part {part} of the model makes {wanted.dtype} of shape {wanted.shape} by its outline"
        self.problem = self.problem or ValueError(f"{outline}, found {found}")
        return None


class StageTrainer(StageEvaluator):
    """Computations of a stage in training: forwards, backwards and weight gradients (`runner.StageWork`).

    `note` is called with the bytes alive after every forward.
    """

    def __init__(self, *args: Any, scale: float, note: Callable[[int], None] | None = None):
        super().__init__(*args)
        self._scale, self._note = scale, note
        self._passes: dict[tuple[int, int], MicrobatchPass] = {}
        self._deferred: dict[tuple[int, int], DeferredGradients] = {}
        self._alive: dict[tuple[int, int], int] = {}

    def forward(self, chunk: int, microbatch: int, x: Array) -> Array:
        key = chunk, microbatch
        self._passes[key], output = self._through(self._chunks[chunk], microbatch, x, keep=True)
        one = self._microbatches[microbatch]
        if self._note and one.number is not None:
            self._alive[key] = self._passes[key].nbytes((one.x, one.y), output)
            self._note(sum(self._alive.values()))
        return output

    def backward(self, chunk: int, microbatch: int, dy: Array, whole: bool) -> Array:
        here, key = self._chunks[chunk], (chunk, microbatch)
        pass_ = self._passes[key]
        if here.last:
            pass_.loss_backward(self._scale)
        else:
            pass_.take(dy)
        if whole:
            here.begin_backward(microbatch, self._microbatches[microbatch].number)
            self._back(here, pass_, here)
            self._end(here, key)
        else:
            deferred = self._deferred[key] = DeferredGradients()
            self._back(here, pass_, deferred)
        dx = pass_.give_back()
        return None if here.first else self._fitting(dx, here.number - 1, microbatch)

    def weights(self, chunk: int, microbatch: int) -> None:
        here, key = self._chunks[chunk], (chunk, microbatch)
        here.begin_backward(microbatch, self._microbatches[microbatch].number)
        pass_ = self._passes[key]
        for number, gradients in self._deferred.pop(key).units:
            pass_.compute_deferred(gradients, here)
            here.left(number)
        self._end(here, key)

    def _back(self, chunk: StageChunk, pass_: MicrobatchPass, sink: StageChunk | DeferredGradients) -> None:
        for number in reversed(chunk.units):
            chunk.unshard()
            pass_.backward(chunk.units[number], sink)
            chunk.reshard()
            sink.left(number)
            self._progress()
        self.problem = self.problem or pass_.problem

    def _end(self, chunk: StageChunk, key: tuple[int, int]) -> None:
        pass_ = self._passes.pop(key)
        self.problem = self.problem or pass_.problem
        self._alive.pop(key, None)
        chunk.end_backward()
