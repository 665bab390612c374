"""Forward and backward pass of one micro-batch, unit by unit.

A rank without a micro-batch, or whose model has raised an exception, makes the same calls without computing, so that
collectives inside the passes match; errors are exchanged at the end of the step. Gradients are multiplied by the loss
scale; the update of `parallel.engine.data_parallel.sharded_optimizer` divides it out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from parallel.data.sampler import Batch
from parallel.engine.exchange_guard import GuardedLoss
from parallel.engine.gradient_hooks import HookedGradients
from parallel.engine.step_sync import Losses
from parallel.nn.array_checks import checked, expect_gradient, expect_type, float_type, label, named, type_after
from parallel.nn.kernels.deferred import is_deferred
from parallel.nn.kernels.storage import HALVES, widen
from parallel.nn.operator import GradientSink, Operator, Parameter, PassMode, arrays_of, forward_of, spec_of
from parallel.nn.own_arrays import watched
from parallel.runtime.validation import real_number
from parallel.runtime.vector_memory import to_host
from parallel.sharding.context.models_by_length import LengthModel
from quant.types import Array


class MicrobatchTurn(NamedTuple):
    """Turn of a rank in a step: the model for its micro-batch, this rank's part of that (None: none), the passes."""

    number: int
    here: LengthModel
    batch: Batch | None
    passes: MicrobatchPass

    @property
    def losses(self) -> Losses:
        """Number of the micro-batch with each term of its loss."""
        return [] if self.batch is None else [(self.batch.number, loss) for loss in self.passes.losses]

    @property
    def nbytes(self) -> int:
        """Bytes of arrays held for the backward pass."""
        return self.passes.nbytes(() if self.batch is None else (self.batch.x, self.batch.y))


Result = TypeVar("Result")

Measure = Callable[[Array, Array], float]
"""Function of scores and targets, summed over a micro-batch."""


class Prediction:
    """Measure of an evaluation that collects scores in the place of losses; targets are places in the result.

    `places` are targets for inputs x, of shape (samples, length of axis 1 of x), so that they are divided as sequences
    are. They number positions, for models with scores of each, and else samples.
    """

    def __init__(self, x: Any):
        shape = (*np.shape(x), 1)[:2]
        self.places = np.arange(math.prod(shape)).reshape(shape)
        self._found: list[tuple[tuple[int, ...], np.ndarray, np.ndarray]] = []

    def count(self, targets: Array) -> float:
        """Number of places, as of a loss."""
        return targets.size  # type: ignore[no-any-return]

    def __call__(self, scores: Array, places: Array) -> float:
        """Keep the scores of a micro-batch on the host, half types as float32."""
        scores, places = to_host(widen(scores) if scores.dtype in HALVES else scores), to_host(places)
        lead = self.places.shape if scores.shape[:2] == places.shape else self.places.shape[:1]
        rows = places.reshape(-1) if len(lead) == 2 else places[:, 0] // self.places.shape[1]
        if len(scores) != len(places):
            raise ValueError(f"predict: expected scores of {len(places)} samples, found shape {scores.shape}")
        self._found.append((lead, rows, scores.reshape(len(rows), *scores.shape[len(lead) :])))
        return 0.0

    def drop(self) -> None:
        """Leave the scores to another rank, which has the same."""
        self._found.clear()

    def gathered(self, comm: Any) -> np.ndarray:
        """Scores of all samples, in their order. Collective."""
        every = [one for found in comm.allgather(self._found) for one in found]
        lead, _, scores = every[0]
        whole = np.empty((math.prod(lead), *scores.shape[1:]), scores.dtype)
        for _, rows, scores in every:
            whole[rows] = scores
        return whole.reshape(*lead, *whole.shape[1:])


def counted_by(loss: Any, measure: Measure | None) -> Any:
    """Object whose `count` counts targets: the loss, or a `Prediction` in its place."""
    return measure if isinstance(measure, Prediction) else loss


QUIET: dict[str, Any] = {"over": "ignore", "invalid": "ignore", "divide": "ignore"}
"""Suppressed NumPy warnings: non-finite losses and gradients are found when ranks synchronise."""


def guarded(method: Callable[..., Result]) -> Callable[..., Result | None]:
    """Decorate a method of `MicrobatchPass`: no-op without a batch or after an error; errors are kept in `problem`."""

    @wraps(method)
    def call(self: MicrobatchPass, *args: Any) -> Result | None:
        if (self._x is None and self._dy is None) or self.problem is not None:
            return None
        try:
            with np.errstate(**QUIET):
                return method(self, *args)
        except BaseException as error:
            self._fail(error)
            return None

    return call


class MicrobatchPass:
    """Forward and backward pass of one micro-batch, unit by unit; without data, or after an error, it computes nothing.

    `x` and `y` are inputs and targets, or the outputs of the units before, or None. `saved` are the values of the
    units' forward passes, each released by its backward; `losses` are terms of the sum of losses, `total`, and
    `measured` is the sum of a measure. The first error is caught and kept in `problem`.
    """

    def __init__(self, x: Array, y: Array, run: PassMode, loss: Any):
        self._x, self._y, self._run, self._loss = x, y, run, loss
        self._errors = loss.errors if isinstance(loss, GuardedLoss) else None  # exchanges go on after one
        self._dy: Array = None
        self._saved_loss: Any = None
        self.saved: list[Any] = []
        self._inputs: list[Any] = []  # specs of the inputs of the units in `saved`
        self._passed: Operator | None = None  # by the backward pass
        self.losses: tuple[float, ...] = ()
        self.measured = 0.0
        self.problem: BaseException | None = None

    @guarded
    def forward(self, units: Sequence[Operator], number: int) -> None:
        """Forward pass of the unit `number` of the model's `units`."""
        unit = units[number]
        self._run.enter(units, number)
        with watched(unit, self._run):
            y, saved = forward_of(unit, self._x, self._run)
        expect_type(unit, "result", y, type_after(unit, self._x))
        self._inputs.append(spec_of(self._x))
        self._x = y
        self.saved.append(saved)

    @guarded
    def score(self, measure: Measure | None = None) -> None:
        if not isinstance(measure, Prediction):
            found, self._saved_loss = self._loss.forward(self._x, self._y)
            terms = found if isinstance(found, tuple) else (found,)
            with self._noted():
                self.losses = tuple(term if is_deferred(term) else real_number(term) for term in terms)
        if measure:
            whole = getattr(self._loss, "whole", None)  # of a loss whose scores are cut over ranks
            scores = whole(self._x) if whole else self._x
            with self._noted():
                self.measured = real_number(measure(scores, self._y))

    def _noted(self) -> AbstractContextManager[None]:
        """Context of computations after which exchanges go on, if there are any."""
        return nullcontext() if self._errors is None else self._errors.noted()

    @property
    def total(self) -> float:
        return math.fsum(self.losses)

    def give(self) -> Array:
        """Return the output of the last unit, to send to the next pipeline stage, and release it here."""
        y, self._x = self._x, None
        return y

    def take(self, dy: Array) -> None:
        """Set the gradient of the output, received from the next pipeline stage; ignored after an error.

        None, which that stage sends after an error or without data, ends this pass.
        """
        self._dy = None if self.problem else dy
        if dy is None:
            self.saved.clear()

    def give_back(self, expected: bool) -> Array:
        """Return the gradient of the inputs, to send to the previous pipeline stage, and release it here.

        None after an error or without data. If it is `expected`, a unit that has returned None is in error.
        """
        dx, self._dy = self._dy, None
        if dx is None and expected and self._passed is not None and self.problem is None:
            error = f"{label(self._passed)}: expected backward to return the gradient of its input, found None"
            self._fail(TypeError(error))
        return dx

    def nbytes(self, inputs: Sequence[Array], output: Array = None) -> int:
        """Bytes of arrays held between forward and backward, plus those of `output`, which `give` returned.

        `inputs` are x and y of the micro-batch: of a data set that they are views of, only their own bytes count.
        """
        given: Counter[int] = Counter()
        for array in inputs:
            given.update(dict.fromkeys(arrays_of(array), array.nbytes))
        held = arrays_of((self._x, self._y, self.saved, self._saved_loss, output))
        return sum(min(array.nbytes, given.get(key, array.nbytes)) for key, array in held.items())

    @guarded
    def loss_backward(self, scale: float) -> None:
        self._dy = self._loss.backward(scale, self._saved_loss)
        expect_type(self._loss, "gradient", self._dy, float_type(self._x))
        self._x = self._saved_loss = None

    def backward(self, unit: Operator, grads: GradientSink) -> None:
        """Backward pass of a unit; without a gradient only of a first unit, or one without trained parameters."""
        if self._dy is None and self.saved and any(one.requires_grad for one in unit.parameters()):
            self._fail(
                TypeError(f"{label(unit)}: expected the gradient of its result, found None of the unit after it")
            )
        self._backward(unit, grads)

    @guarded
    def _backward(self, unit: Operator, grads: GradientSink) -> None:
        sink = grads if self._errors is None else self._errors.sink(grads)
        gradients = HookedGradients(sink, self._errors)
        dx = unit.backward(self._dy, self.saved.pop(), checked(unit, gradients))
        gradients.finish()
        x, self._passed = self._inputs.pop(), unit
        if dx is not None:
            expect_type(unit, "gradient", dx, float_type(self._dy))
            expect_gradient(unit, dx, x)
        self._dy = dx

    def compute_deferred(
        self, later: Iterable[tuple[Parameter, Callable[[Array], object]]], grads: GradientSink
    ) -> None:
        if self.problem is not None:
            return
        try:
            with np.errstate(**QUIET):
                for parameter, compute in later:
                    grads(parameter, compute)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Note an error of computations; that of an exchange is raised, as this rank cannot go on with the others."""
        if getattr(error, "left_collective", False):
            raise error
        self.problem = named(error, self._loss)
        self.saved.clear()
        self._x = self._dy = self._saved_loss = None


def empty_pass() -> MicrobatchPass:
    return MicrobatchPass(None, None, PassMode(), None)


def batch_without_samples(mine: Sequence[Batch], lengths: Sequence[int], comm: Any, xp: ModuleType) -> Batch:
    """Batch of no samples like those of the step, for turns in which a rank takes part without a micro-batch.

    `lengths` are the numbers of micro-batches of all ranks, not all 0; `mine` are this rank's. Collective if some rank
    has none.
    """
    like = [(one.shape[1:], one.dtype) for one in (mine[0].x, mine[0].y)] if mine else None
    if not min(lengths):
        like = comm.bcast(like, lengths.index(max(lengths)))
    x, y = (xp.empty((0, *shape), dtype) for shape, dtype in like or ())
    return Batch(-1, x, y, np.empty(0, np.int64))
