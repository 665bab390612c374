"""Computations of a stage: forwards and backwards of its units on the micro-batches of its pipeline."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel.engine.data_parallel.grad_bucket import of
from parallel.engine.data_parallel.partition_spec import units_of
from parallel.engine.data_parallel.sharded_optimizer import ParamShard
from parallel.engine.microbatch_pass import Measure, MicrobatchPass, empty_pass
from parallel.engine.step_sync import Losses
from parallel.nn.kernels.storage import array_namespace
from parallel.nn.operator import ArraySpec, Operator, Parameter, PassMode, nbytes_of, parts_of, spec_of
from parallel.pipeline.param_division import SharedParamGroup
from parallel.pipeline.schedule.actions import Kind
from parallel.pipeline.schedule.lowering import COMPUTED
from parallel.sharding.context.models_by_length import LengthModel
from quant.types import Array

Compute = Callable[[Array], object]


class StageChunk:
    """Part of the model on this stage. Also the sink for the gradients of its parameters.

    `number` is that of the part; `units` are numbers of units in the model, ascending; `shares` are this rank's shards
    of its weights.
    """

    def __init__(self, number: int, parts: int, units: range, shares: Sequence[tuple[SharedParamGroup, ParamShard]]):
        self.number, self.units, self.shares = number, units, shares
        self.first, self.last = number == 0, number == parts - 1
        self._groups = [_sink_of(group, number, part) for group, part in shares]
        self._sinks = {id(tensor.parameter): sink for sink in self._groups for tensor in sink.group.tensors}

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
        for sink in self._groups:
            sink.begin_backward(turn, number)

    def __call__(self, parameter: Parameter, compute: Compute) -> None:
        """Accumulate the gradient of a parameter, which ``compute(array)`` writes."""
        of(self._sinks, parameter)(parameter, compute)

    def left(self, unit: int) -> None:
        for sink in self._groups:
            sink.left(unit)

    def end_backward(self, pass_: MicrobatchPass) -> None:
        for sink in self._groups:
            sink.end_backward(pass_)


class GroupGradients:
    """Gradient sink of a parameter group, for the part `number` of the model."""

    def __init__(self, group: SharedParamGroup, number: int, gradients: Any):
        self.group, self._part, self._gradients = group, number, gradients

    def begin_backward(self, turn: int, number: int | None) -> None:
        """Begin the backward of micro-batch `number`, None for an empty one."""
        self._counts = number is not None or self.group.holder is not None  # experts have other ranks' tokens
        self._gradients.begin_backward(turn, None if number is None else self.group.leaf(number, self._part))

    def __call__(self, parameter: Parameter, compute: Compute) -> None:
        if self._counts:
            self._gradients(parameter, compute)

    def left(self, unit: int) -> None:
        self._gradients.left(unit)

    def end_backward(self, pass_: MicrobatchPass) -> None:
        self._gradients.end_backward()


class OrderedGroupGradients(GroupGradients):
    """Sink of a group with several parts in reproducible training: every term is a leaf of the sum, in a fixed order.

    The functions of all terms are kept until the end of a backward, and then called as if each had a backward of its
    own (`parallel.pipeline.param_division`).
    """

    def begin_backward(self, turn: int, number: int | None) -> None:
        self._turn, self._number = turn, number
        self._terms: dict[int, list[tuple[Parameter, Compute]]] = {}

    def __call__(self, parameter: Parameter, compute: Compute) -> None:
        """Keep a term. ValueError if it is one too many: single ranks add them in another order."""
        if self._number is None:
            return
        terms = self._terms.setdefault(id(parameter), [])
        if len(terms) == self.group.terms:
            raise ValueError(
                f"reproducible: {parameter.name} belongs to several parts of the model, and its gradient came "
                f"{len(terms) + 1} times in one backward; in one order for any layout expected {len(terms)}"
            )
        terms.append((parameter, compute))

    def left(self, unit: int) -> None:
        """No-op: the terms come at the end."""

    def end_backward(self, pass_: MicrobatchPass) -> None:
        for term in range(1 if self._number is None else self.group.terms):
            leaf = None if self._number is None else self.group.leaf(self._number, self._part, term)
            self._gradients.begin_backward(self._turn, leaf)
            here = [terms[term] for terms in self._terms.values() if term < len(terms)]
            pass_.compute_deferred(here, self._gradients)
            self._gradients.end_backward()
        self._terms.clear()


def _sink_of(group: SharedParamGroup, number: int, part: ParamShard) -> GroupGradients:
    ordered = part.context.plan.reproducible and len(group.parts) > 1
    return (OrderedGroupGradients if ordered else GroupGradients)(group, number, part.gradients)


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
    """Micro-batch of a pipeline, numbered in the step over all pipelines. `x` and `y` are in the model's dtypes.

    Of sequences that ranks share they are this rank's part, for which `model` is made; its term of the gradient is
    number `leaf`. Without a number it is empty: one that other replicas have, of whose exchanges this rank makes its
    part. If replicas share experts, x and y then have no samples and pass through the model; else they are None.
    """

    number: int | None
    leaf: int | None
    model: LengthModel
    x: Array
    y: Array
    run: PassMode
    output_specs: Sequence[ArraySpec]  # of each part of the model

    @property
    def units(self) -> tuple[Operator, ...]:
        return units_of(self.model.model)


def empty_microbatch(model: LengthModel, parts: int) -> Microbatch:
    return Microbatch(None, None, model, None, None, PassMode(), [ArraySpec((0,), np.dtype(np.uint8))] * parts)


class StageEvaluator:
    """Computations of a stage in an evaluation: forwards only (`runner.StageWork`).

    `progress` is called between units to progress messages; `measure` is a function of scores and targets. `losses` are
    those computed here, by number of the micro-batch. After the first error, `problem`, nothing is computed.
    """

    def __init__(
        self,
        chunks: Mapping[int, StageChunk],
        microbatches: Sequence[Microbatch],
        progress: Callable[[], None],
        measure: Measure | None = None,
    ):
        self._chunks, self._microbatches = chunks, microbatches
        self._progress, self._measure = progress, measure
        self.losses: Losses = []
        self.measured = 0.0
        self.problem: BaseException | None = None

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
        """Forward of a chunk on a micro-batch. Returns the pass (arrays for a backward if `keep`) and output or None.

        The output is None on the last part of the model and after an error.
        """
        one = self._microbatches[microbatch]
        x, y = one.x if chunk.first else self._given(x, chunk.number - 1, one), one.y if chunk.last else None
        pass_ = empty_pass() if self.problem else MicrobatchPass(x, y, one.run, one.model.loss)
        units = one.units
        for number in chunk.units:
            chunk.unshard()  # collective: also after an error
            pass_.forward(units, number)
            chunk.reshard()
            if not keep:
                pass_.saved.clear()
            self._progress()
        if chunk.last:
            pass_.score(None if one.number is None else self._measure)
        if chunk.last and one.number is not None:
            self.measured += pass_.measured
            self.losses += [(one.number, loss) for loss in pass_.losses]
        self.problem = self.problem or pass_.problem
        output = None if chunk.last else self._fitting(pass_.give(), chunk.number, microbatch)
        return pass_, output

    def _given(self, array: Array, part: int, one: Microbatch) -> Array:
        """Array that came from another stage, of a part's output or its gradient. Without samples none comes."""
        spec = one.output_specs[part]
        if array is not None or one.x is None or nbytes_of(spec):
            return array
        made = tuple(array_namespace(one.x).empty(*each) for each in parts_of(spec))
        return made if type(spec) is tuple else made[0]

    def _fitting(self, array: Array, part: int, microbatch: int) -> Array:
        """The array if it has the shape and dtype of the part's outline. Else None, and `problem` is set."""
        wanted, found = self.output_spec(part, microbatch), spec_of(array)
        if (
            array is None
            or found == wanted
            or [*parts_of(found)]
            == [spec if one is not None else None for spec, one in zip(parts_of(wanted), parts_of(array))]
        ):
            return array
        outline = f"part {part} of the model makes {described(wanted)} by its outline"
        self.problem = self.problem or ValueError(f"{outline}, found {described(found)}")
        return None


def described(specs: Any) -> str:
    """Types and shapes of an array, or of a tuple, for messages."""
    return " and ".join("nothing" if one is None else f"{one.dtype} of shape {one.shape}" for one in parts_of(specs))


class StageTrainer(StageEvaluator):
    """Computations of a stage in training: forwards, backwards and weight gradients (`runner.StageWork`).

    `note` is called after every forward with the bytes alive: those of the backward in a pair with it too.
    """

    def __init__(self, *args: Any, scale: float, note: Callable[[int], None] | None = None):
        super().__init__(*args)
        self._scale, self._note = scale, note
        self._passes: dict[tuple[int, int], MicrobatchPass] = {}
        self._deferred: dict[tuple[int, int], DeferredGradients] = {}
        self._alive: dict[tuple[int, int], int] = {}

    def forward(self, chunk: int, microbatch: int, x: Array) -> Array:
        key, before = (chunk, microbatch), sum(self._alive.values())
        self._passes[key], output = self._through(self._chunks[chunk], microbatch, x, keep=True)
        one = self._microbatches[microbatch]
        if self._note and one.number is not None:
            self._alive[key] = self._passes[key].nbytes((one.x, one.y), output)
            self._note(before + self._alive[key])
        return output

    def backward(self, chunk: int, microbatch: int, dy: Array, whole: bool) -> Array:
        here, key = self._chunks[chunk], (chunk, microbatch)
        pass_ = self._passes[key]
        if here.last:
            pass_.loss_backward(self._scale)
        else:
            pass_.take(self._given(dy, here.number, self._microbatches[microbatch]))
        if whole:
            here.begin_backward(microbatch, self._microbatches[microbatch].leaf)
            self._back(here, key, here)
            self._end(here, key)
        else:
            deferred = self._deferred[key] = DeferredGradients()
            self._back(here, key, deferred)
        dx = pass_.give_back(expected=not here.first)
        self.problem = self.problem or pass_.problem
        return None if here.first else self._fitting(dx, here.number - 1, microbatch)

    def weights(self, chunk: int, microbatch: int) -> None:
        here, key = self._chunks[chunk], (chunk, microbatch)
        here.begin_backward(microbatch, self._microbatches[microbatch].leaf)
        pass_ = self._passes[key]
        for number, gradients in self._deferred.pop(key).units:
            pass_.compute_deferred(gradients, here)
            here.left(number)
        self._end(here, key)

    def _back(self, chunk: StageChunk, key: tuple[int, int], sink: StageChunk | DeferredGradients) -> None:
        pass_, units = self._passes[key], self._microbatches[key[1]].units
        for number in reversed(chunk.units):
            chunk.unshard()
            pass_.backward(units[number], sink)
            chunk.reshard()
            sink.left(number)
            self._progress()
        self.problem = self.problem or pass_.problem

    def _end(self, chunk: StageChunk, key: tuple[int, int]) -> None:
        pass_ = self._passes.pop(key)
        chunk.end_backward(pass_)
        self.problem = self.problem or pass_.problem
        self._alive.pop(key, None)
