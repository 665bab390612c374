"""Measured seconds of a model's units and of optimizer updates, on as many ranks at once as there are cores.

Each is measured once. A trial takes a few milliseconds, up to a few passes of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from parallel.data.sampler import Batch
from parallel.engine.base import type_of
from parallel.engine.data_parallel.partition_spec import units_of
from parallel.engine.model_on_mesh import cut_for, sequence_models
from parallel.engine.settings import MODEL_FIELDS, Settings
from parallel.nn.flat_params import BLOCK, FlatParams, ParamSpan, Span
from parallel.nn.operator import Operator, Parameter, PassMode, constant
from parallel.optim.grad_norm import block_squares
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.optim.precision import PRECISIONS
from parallel.planning.measured.core_sharing import CoreSharing
from parallel.planning.measured.measurement_record import MeasurementRecord
from parallel.planning.measured.recording_comm import AxisExchange, RecordingComm, RecordingPlace
from parallel.sharding.axes import AXES
from parallel.sharding.mesh import Mesh
from parallel.sharding.tensor.tensor_axis import expert_cut
from quant.types import Array

UNIT_FIELDS = (
    *MODEL_FIELDS,
    *("precision", "reproducible"),
    *(name for axis in AXES.values() for name in axis.options),
)
"""Fields of `Settings` on which costs of a unit depend.

Beside these they depend on the samples of a micro-batch, the ranks of `UNIT_AXES`, and the cut of experts.
"""

UNIT_AXES = [name for name, axis in AXES.items() if axis.input is not None and not axis.own_samples]
"""Mesh axes whose ranks share the units of a model."""

SECONDS, TIMES = 0.2, (5, 25)
"""Seconds of a measurement, and least and most repetitions after a first one. The median counts."""


class UnitCost(NamedTuple):
    """Seconds of a unit for one micro-batch: forward, gradients of its input and of its weights. And its exchanges."""

    forward: float
    backward: float
    weights: float
    exchanges: tuple[AxisExchange, ...] = ()
    parameters: int = 0


class Workpiece(NamedTuple):
    """Model and loss of a training, and a function that runs them on a number of samples."""

    model: Operator
    loss: Any
    take: Callable[[int], tuple[Array, Array]]


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs of computation from a record. All methods are collective. Results are equal on all ranks.

    Where more ranks than cores compute at once, each takes `sharing.crowd` times as long as measured.
    """

    record: MeasurementRecord

    @property
    def sharing(self) -> CoreSharing:
        return self.record.sharing

    def units(
        self, work: Workpiece, settings: Settings, samples: int, mesh: Mesh, waits: bool = False
    ) -> list[UnitCost]:
        """Costs of all units for a micro-batch of `samples`, on a rank of the mesh.

        Ranks that share the units, and with `waits` all, wait for the slowest one in every unit, else in every pass.
        """
        sizes = [mesh.sizes.get(axis, 1) for axis in UNIT_AXES]
        trial = partial(_unit_costs, work, settings, samples, mesh)
        key = "units", *_unit_key(settings, samples), *sizes, *expert_cut(settings, mesh)
        trials = self.record.results(key, trial)
        return _slowest(trials, together=waits or max(sizes) > 1)

    def update(
        self, optimizer: Optimizer, settings: Settings, elements: int, work: Workpiece | None = None, samples: int = 0
    ) -> float:
        """Seconds to compute the norm of `elements` gradients and to update as many weights.

        With `work`, measured after a pass of the model for `samples`, for its effect on caches.
        """
        trial = partial(_update_seconds, optimizer, settings, elements, work, samples)
        passes = None if work is None else _unit_key(settings, samples)
        key = "update", type(optimizer).__name__, settings.precision, elements, passes
        return float(median(self.record.results(key, trial)))

    def sum_of_gradients(self, elements: int) -> float:
        """Seconds to add a gradient of `elements` elements to another one."""
        return float(median(self.record.results(("add", elements), partial(_add_seconds, elements))))


def _unit_key(settings: Settings, samples: int) -> tuple[Any, ...]:
    return *(getattr(settings, name) for name in UNIT_FIELDS), samples


def _unit_costs(work: Workpiece, settings: Settings, samples: int, mesh: Mesh) -> dict[str, Any]:
    """Seconds of all units in several passes of the whole model, on rank 0 of the mesh.

    The last unit includes the loss. Caches have the same contents as in a training.
    """
    recorder, model, loss = RecordingComm(), work.model, work.loss
    place = RecordingPlace(mesh, recorder.exchanges)
    if mesh.alike.size < mesh.size:
        model, loss = cut_for(model, loss, place, settings)
    x, y = work.take(samples)
    here = sequence_models(model, loss, place, settings).of_shape(x.shape)
    part = here.part(Batch(0, x, y, np.arange(samples)))
    trial = _TrialPass(here.model, here.loss, settings.precision, part, recorder)
    seconds = _repeated(trial.seconds)
    sizes = [sum(parameter.size for parameter in unit.parameters()) for unit in units_of(here.model)]
    trial.close()
    return {"passes": seconds, "exchanges": trial.exchanges, "parameters": sizes}


def _slowest(trials: Sequence[dict[str, Any]], together: bool) -> list[UnitCost]:
    """Units with the median seconds of all passes, scaled to the sum of ranks that wait for others.

    This sum is the median,

    over simultaneous passes, of the slowest rank's. Ranks that share units, `together`, wait for the slowest in each.
    """
    count = min(len(trial["passes"]) for trial in trials)
    seconds = np.array([trial["passes"][:count] for trial in trials])  # rank, pass, unit, part
    middle = np.median(seconds, axis=(0, 1))
    whole = seconds.max(0).sum((1, 2)) if together else seconds.sum((2, 3)).max(0)
    middle *= np.median(whole) / middle.sum()
    exchanges = ([AxisExchange(*each) for each in unit] for unit in trials[0]["exchanges"])
    return [
        UnitCost(float(forward), float(backward), float(weights), tuple(along), size)
        for (forward, backward, weights), along, size in zip(middle, exchanges, trials[0]["parameters"])
    ]


def _repeated(run: Callable[[], Any]) -> list[Any]:
    """Results of repetitions after a first one. `SECONDS` and `TIMES` limit their number."""
    began = time.perf_counter()
    run()
    count = round(SECONDS / (time.perf_counter() - began))
    return [run() for _ in range(min(TIMES[1], max(TIMES[0], count)))]


class _TrialPass:
    """Passes of a model with weights and gradients of its own."""

    def __init__(self, model: Operator, loss: Any, precision: str, batch: Batch, comm: RecordingComm):
        recipe, (_, x, y, _) = PRECISIONS[precision], batch
        self._x, self._y = x.astype(type_of(x, recipe.storage)), y.astype(type_of(y, recipe.wide))
        self._flat, self._units, self._loss, self._comm = FlatParams(model), units_of(model), loss, comm
        weights = np.empty(self._flat.length, recipe.wide)
        self._flat.initialise(weights, 0)
        self._flat.bind(weights.astype(recipe.storage))
        self._gradient = np.zeros(self._flat.length, recipe.wide)
        self._starts = {id(place.parameter): place.span.start for place in self._flat.places}
        self.exchanges: list[list[AxisExchange]] = []

    def seconds(self) -> list[tuple[float, float, float]]:
        """Seconds of each unit's forward pass, and of the gradients of its input and its weights."""
        x, run, saved, comm = self._x, PassMode(samples=np.arange(len(self._x))), [], self._comm
        forward, backward, exchanges = [], [], []
        for unit in self._units:
            began = time.perf_counter()
            x, kept = unit.forward(x, run)
            forward.append(time.perf_counter() - began)
            saved.append(kept)
            exchanges.append(comm.take())
        began = time.perf_counter()
        dy = self._loss.backward(1.0, self._loss.forward(x, self._y)[1])
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
            place.parameter.release()


def _median_seconds(run: Callable[[], object], before: Callable[[], object] = bool) -> float:
    """Median seconds of `run`, with a call of `before` each time that does not count."""

    def once() -> float:
        before()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return float(median(_repeated(once)))


def _update_seconds(
    optimizer: Optimizer, settings: Settings, elements: int, work: Workpiece | None, samples: int
) -> float:
    recipe, size = PRECISIONS[settings.precision], -(-elements // BLOCK) * BLOCK
    if not size:
        return 0.0
    weights, gradient = np.zeros(size, recipe.wide), np.full(size, 1e-3, recipe.wide)
    stored = weights.astype(recipe.storage) if recipe.master else None
    place = ParamSpan(Parameter((size,), constant(0.0)), Span(0, size))
    piece = OptimizerSpan(place.span, weights, gradient, optimizer.fresh(weights), [place], stored)

    def run() -> None:
        block_squares(gradient)
        optimizer.update([piece], 0, 1.0)

    if work is None:
        return _median_seconds(run)
    batch = Batch(0, *work.take(samples), np.arange(samples))
    trial = _TrialPass(work.model, work.loss, settings.precision, batch, RecordingComm())
    found = _median_seconds(run, trial.seconds)
    trial.close()
    return found


def _add_seconds(elements: int) -> float:
    one, other = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
    return _median_seconds(partial(np.add, one, other, out=one))
