"""Measured seconds of a model's units and of optimizer updates, on as many ranks at once as there are cores.

Each is measured once; a trial takes a few milliseconds up to a few passes of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from parallel.data_parallel.partition_spec import units_of
from parallel.engine.base import type_of
from parallel.engine.divided_sequences import TENSOR
from parallel.engine.model_on_mesh import cut_for
from parallel.engine.settings import MODEL_FIELDS, Settings
from parallel.forecast.core_sharing import CoreSharing
from parallel.forecast.measurement_record import MeasurementRecord
from parallel.forecast.recording_comm import RecordingComm, TensorExchange
from parallel.mesh.device_mesh import MeshAxis
from parallel.mesh.mesh import Mesh
from parallel.nn.flat_params import BLOCK, FlatParams, ParamSpan, Span
from parallel.nn.operator import Operator, Parameter, PassMode, constant
from parallel.optim.grad_norm import block_squares
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.optim.precision import PRECISIONS, Precision
from quant.types import Array

UNIT_FIELDS = (*MODEL_FIELDS, "precision", "sequence_parallel", "tensor_shards", "reproducible")
"""Fields of `Settings` on which costs of a unit depend, beside the samples of a micro-batch and the ranks of tp."""

TIMES = 5
"""Repetitions of a measurement, beside a first one; the median counts, as of the steps of a training."""


class UnitCost(NamedTuple):
    """Seconds of a unit for one micro-batch: forward, gradients of its input and its weights; exchanges along tp."""

    forward: float
    backward: float
    weights: float
    exchanges: tuple[TensorExchange, ...] = ()
    parameters: int = 0

    @classmethod
    def read(cls, values: Sequence[Any]) -> UnitCost:
        """Cost from a list, as JSON has it."""
        forward, backward, weights, exchanges, parameters = values
        return cls(forward, backward, weights, tuple(TensorExchange(*each) for each in exchanges), parameters)


class Workpiece(NamedTuple):
    """Model and loss of a training, and a function that takes so many samples."""

    model: Operator
    loss: Any
    take: Callable[[int], tuple[Array, Array]]


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs of computation from a record. All methods are collective; results are equal on all ranks.

    Where more ranks than cores compute at once, each takes `sharing.crowd` times as long as measured.
    """

    record: MeasurementRecord

    @property
    def sharing(self) -> CoreSharing:
        return self.record.sharing

    def units(self, work: Workpiece, settings: Settings, samples: int, tp: int) -> list[UnitCost]:
        """Costs of all units for a micro-batch of `samples`, on a rank of `tp`."""
        trial = partial(_unit_costs, work, settings, samples, tp)
        key = "units", *(getattr(settings, name) for name in UNIT_FIELDS), samples, tp
        return _median_units([[UnitCost.read(unit) for unit in units] for units in self.record.results(key, trial)])

    def update(self, optimizer: Optimizer, settings: Settings, elements: int) -> float:
        """Seconds to compute the norm of so many gradients and to update as many weights."""
        trial = partial(_update_seconds, optimizer, settings.precision, elements)
        key = "update", type(optimizer).__name__, settings.precision, elements
        return float(median(self.record.results(key, trial)))

    def sum_of_gradients(self, elements: int) -> float:
        """Seconds to add a gradient of so many elements to another one."""
        return float(median(self.record.results(("add", elements), partial(_add_seconds, elements))))


def _unit_costs(work: Workpiece, settings: Settings, samples: int, tp: int) -> list[UnitCost]:
    """Costs of all units on rank 0 of an axis of `tp` ranks; the last includes the loss.

    The median of several passes of the whole model counts, so that caches are as in a training.
    """
    comm, recipe = RecordingComm(), PRECISIONS[settings.precision]
    model, loss = work.model, work.loss
    if tp > 1:
        mesh = Mesh.parse(settings.mesh or f"{TENSOR}={tp}")
        model, loss = cut_for(model, loss, MeshAxis(TENSOR, 0, tp, comm), mesh, settings)
    trial = _TrialPass(model, loss, recipe, comm)
    x, y = work.take(samples)
    x, y = x.astype(type_of(x, recipe.storage)), y.astype(type_of(y, recipe.wide))
    seconds = np.array([trial.seconds(x, y) for _ in range(TIMES + 1)][1:])
    seconds = np.median(seconds, axis=0)
    costs = zip(seconds, trial.exchanges, units_of(model))
    trial.close()
    return [
        UnitCost(float(forward), float(backward), float(weights), tuple(exchanges), _size(unit))
        for (forward, backward, weights), exchanges, unit in costs
    ]


def _size(unit: Operator) -> int:
    return sum(parameter.size for parameter in unit.parameters())


class _TrialPass:
    """Passes of a model with weights and gradients of its own."""

    def __init__(self, model: Operator, loss: Any, recipe: Precision, comm: RecordingComm):
        self._flat, self._units, self._loss, self._comm = FlatParams(model), units_of(model), loss, comm
        weights = np.empty(self._flat.length, recipe.wide)
        self._flat.initialise(weights, 0)
        self._flat.bind(weights.astype(recipe.storage))
        self._gradient = np.zeros(self._flat.length, recipe.wide)
        self._starts = {id(place.parameter): place.span.start for place in self._flat.places}
        self.exchanges: list[list[TensorExchange]] = []

    def seconds(self, x: Array, y: Array) -> list[tuple[float, float, float]]:
        """Seconds of each unit's forward pass, and of the gradients of its input and its weights."""
        run, saved, comm = PassMode(samples=np.arange(len(x))), [], self._comm
        forward, backward, exchanges = [], [], []
        for unit in self._units:
            began = time.perf_counter()
            x, kept = unit.forward(x, run)
            forward.append(time.perf_counter() - began)
            saved.append(kept)
            exchanges.append(comm.take())
        began = time.perf_counter()
        dy = self._loss.backward(1.0, self._loss.forward(x, y)[1])
        of_loss, of_loss_exchanges = time.perf_counter() - began, comm.take()
        for unit, kept, own in zip(reversed(self._units), reversed(saved), reversed(exchanges)):
            later: list[tuple[Parameter, Callable[[Array], object]]] = []
            began = time.perf_counter()
            dy = unit.backward(dy, kept, lambda parameter, compute, to=later: to.append((parameter, compute)))
            between = time.perf_counter()
            for parameter, compute in later:
                compute(FlatParams.view(self._gradient, parameter, self._starts[id(parameter)]))
            backward.append((between - began, time.perf_counter() - between))
            own += comm.take()
        forward[-1] += of_loss
        exchanges[-1] += of_loss_exchanges
        self.exchanges = exchanges
        return [(first, *rest) for first, rest in zip(forward, reversed(backward))]

    def close(self) -> None:
        for place in self._flat.places:
            place.parameter.data = None


def _median_units(every: Sequence[list[UnitCost]]) -> list[UnitCost]:
    """Units with the median seconds of all ranks that measured."""
    return [
        units[0]._replace(
            forward=median(unit.forward for unit in units),
            backward=median(unit.backward for unit in units),
            weights=median(unit.weights for unit in units),
        )
        for units in zip(*every)
    ]


def _median_seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TIMES + 1):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def _update_seconds(optimizer: Optimizer, precision: str, elements: int) -> float:
    recipe, size = PRECISIONS[precision], -(-elements // BLOCK) * BLOCK
    if not size:
        return 0.0
    weights, gradient = np.zeros(size, recipe.wide), np.full(size, 1e-3, recipe.wide)
    stored = weights.astype(recipe.storage) if recipe.master else None
    place = ParamSpan(Parameter((size,), constant(0.0)), Span(0, size))
    piece = OptimizerSpan(place.span, weights, gradient, optimizer.fresh(weights), [place], stored)

    def run() -> None:
        block_squares(gradient)
        optimizer.update([piece], 0, 1.0)

    return _median_seconds(run)


def _add_seconds(elements: int) -> float:
    one, other = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
    return _median_seconds(partial(np.add, one, other, out=one))
