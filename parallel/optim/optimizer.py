"""Base class of optimizers. They update the spans of the flat vector that a rank owns. Imports no MPI.

A class of `optimizers` declares hyperparameters (`number`), names of state vectors (`moments`), and an update formula.

Constructors take PyTorch's names as well: `lr`, `weight_decay`, `betas`. Frozen parameters (`requires_grad` is False)
and their state are not updated.

Spans are updated in portions that fit the cache. No element's update depends on where spans or portions begin, so
every division of the vector gives the same bits. Norms are float64 sums of squares per block, gathered from all ranks
and added in the order of the vector. Parameters with ``decay=False`` (biases and gains) have no weight decay.

>>> import numpy as np
>>> from parallel.nn.flat_params import BLOCK, ParamSpan, Span
>>> from parallel.nn.operator import Parameter, constant
>>> from parallel.optim.optimizers import SGD
>>> place = ParamSpan(Parameter((3,), constant(1.0)), Span(0, BLOCK))
>>> optimizer = SGD(rate=0.5)
>>> piece = OptimizerSpan(Span(0, BLOCK), np.ones(BLOCK), np.full(BLOCK, 4.0), optimizer.fresh(np.ones(BLOCK)), [place])
>>> optimizer.update([piece], step=0, scale=0.25)
>>> piece.weights[:3].tolist()
[0.5, 0.5, 0.5]
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from itertools import groupby
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from parallel.nn.operator import Parameter
from parallel.optim.kernels import device_updates, formulas
from parallel.optim.kernels.formulas import Formula, average, run, runs_compiled
from parallel.optim.kernels.scalars import RunScalars, Scalars
from parallel.optim.lr_schedules import Rate, describe
from parallel.optim.optimizer_span import ElementRun, OptimizerSpan
from parallel.optim.param_groups import GroupTable, ParamGroup, RateClock, TorchNames, Tuning
from quant.types import Array

Gather = Callable[[np.ndarray], np.ndarray]
"""Block sums of all ranks, in the order of the vector, from the sums of this rank's spans. The same on all ranks."""

EMA = "ema"
"""State vector: moving average of the weights."""

PORTION = {"host": 1 << (14 if formulas.host is None else 16), "device": 1 << 24, "NumPy": 1 << 14}
"""Elements per call. Formulas in NumPy make several passes, in the cache. On a GPU a small call costs most."""

TEMPORARIES = 8
"""Arrays of the size of a portion that a formula in CuPy may need at a time."""

Runs = tuple[tuple[Tuning, ElementRun], ...]
"""Runs of elements with the same hyperparameters."""


def number(default: float, least: float = 0.0, below: float = math.inf) -> Any:
    """Field of an optimizer: a hyperparameter from `least` to `below`."""
    return field(default=default, metadata={"range": (least, below)})


def _is_rate(value: object) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < math.inf


@dataclass(kw_only=True, eq=False)
class Optimizer(metaclass=TorchNames):
    """Base class of optimizers: hyperparameters, and the loop over spans. ValueError for values out of range.

    Hyperparameters may be assigned between steps, equally on all ranks.

    Bias corrections do not count updates in which a parameter was frozen (`OptimizerSpan.missed`).

    Parameters
    ----------
    rate, lr : float, or function of the number of earlier updates
    decay, weight_decay : float
        Applies to parameters that have ``decay=True``.
    groups : sequence of ParamGroup, or of dicts with PyTorch's keys
        Parameters with other values. The first group that has a parameter counts.
    ema : float
        Decay of a moving average of the weights, from 0 (none) to below 1: the state vector "ema", equal to the
        weights after the first update, then ema = decay ema + (1 - decay) w after each (Polyak and Juditsky 1992).
    """

    spare_rows: ClassVar[int] = 0
    """Vectors of scratch memory that an update needs."""

    whole_tensors: ClassVar[bool] = False
    """True if an update needs norms of whole tensors."""

    rate: Rate
    decay: float = number(0.0)
    groups: Sequence[ParamGroup | Mapping[str, Any]] = ()
    ema: float = number(0.0, below=1)
    _table: GroupTable = field(init=False, repr=False)
    _known_runs: WeakKeyDictionary[OptimizerSpan, tuple[Any, Runs]] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )
    _known_numbers: WeakKeyDictionary[OptimizerSpan, Array] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )
    _reserved: Array = field(default=None, init=False, repr=False)
    """From `reserve` to `update`, an array of the size of the largest table of scalars. Then its memory is free."""

    _spare: dict[tuple[type, str], Array] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.rate):
            expect("rate", self.rate, _is_rate(self.rate), "a number from 0 on, or a schedule")
        for one in fields(self):
            if "range" in one.metadata:
                (least, below), value = one.metadata["range"], getattr(self, one.name)
                limits = f"a number from {least:g} on" if below == math.inf else f"{least:g} <= {one.name} < {below:g}"
                expect(one.name, value, least <= value < below, limits)
        groups = tuple(map(ParamGroup.of, self.groups))
        self.groups, self._table = groups, GroupTable(groups)

    if not TYPE_CHECKING:  # which knows the fields without it

        def __setattr__(self, name: str, value: Any) -> None:
            """Set a hyperparameter. It takes effect in the next step.

            ValueError, with nothing changed, for values that the constructor refuses, or that need other state
            vectors. TypeError for other names. Classes derived elsewhere may have attributes of their own.
            """
            names = [one.name for one in fields(self) if one.init]
            is_made, is_derived = "_table" in vars(self), not type(self).__module__.startswith(f"{__package__}.")
            if is_made and not is_derived and not hasattr(self, name):
                raise TypeError(f"{name}: expected one of {', '.join(names)}, an option of {type(self).__name__}")
            # a copy is checked first, so that a refused value changes nothing
            if is_made and name in names:
                made = copy(self)
                del made._table
                vars(made)[name] = value
                made.__post_init__()
                if (found := made.states()) != self.states():
                    kept = f"vectors {', '.join(self.states()) or 'none'}; {value!r} needs {', '.join(found) or 'none'}"
                    raise ValueError(f"{name}: the optimizer has the state {kept}; expected it in the constructor")
                if name == "groups":
                    value, self._table = made.groups, made._table
                    self._known_runs.clear()
            object.__setattr__(self, name, value)

    @property
    def lr(self) -> Rate:
        """Learning rate by PyTorch's name."""
        return self.rate

    @lr.setter
    def lr(self, rate: Rate) -> None:
        self.rate = rate

    @property
    def weight_decay(self) -> float:
        """Weight decay by PyTorch's name."""
        return self.decay

    @weight_decay.setter
    def weight_decay(self, decay: float) -> None:
        self.decay = decay

    def states(self) -> tuple[str, ...]:
        """Names of all state vectors, such as ("m", "v", "ema"), each as long as the weights."""
        return (*self.moments(), *((EMA,) if self.ema else ()))

    def moments(self) -> tuple[str, ...]:
        """Names of the state vectors that the update rule uses, such as ("m", "v")."""
        return ()

    def check(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError if a group has none of these, the named parameters of the model."""
        self._table.check(parameters)

    def fresh(self, weights: Array) -> dict[str, Array]:
        """Initial state vectors by name: zeros like the weights."""
        return {name: np.zeros_like(weights) for name in self.states()}

    def rates(self, clock: RateClock) -> list[float]:
        """Learning rates at `clock`: the optimizer's own, then the groups'."""
        return self._table.rates(self.rate, clock)

    def describe(self) -> dict[str, Any]:
        """Optimizer name and hyperparameters, for a checkpoint."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        own = {"rate": describe(self.rate), "groups": [group.describe() for group in self._table.groups]}
        return {"name": type(self).__name__.lower(), **settings, **own}

    def clock_at(self, step: int) -> RateClock:
        """Time of an update for `update`, with its learning rates. Raises errors of schedules."""
        clock = RateClock(step)
        return clock._replace(known=tuple(self._table.rates(self.rate, clock)))

    def update(
        self,
        pieces: Sequence[OptimizerSpan],
        step: int,
        scale: float,
        gather: Gather | None = None,
        clock: RateClock | None = None,
    ) -> None:
        """Make one optimizer step: update weights, state and half-precision copies (`stored`) of this rank's spans.

        Parameters
        ----------
        pieces : sequence of OptimizerSpan
            May be empty, as may be each of them.
        step : int
            Number of earlier updates.
        scale : float
            Factor of the gradients: 1 / (global count x loss scale) x clip factor. ValueError if it is not finite.
        gather : callable
            Collective. Only LAMB needs it.
        clock : RateClock
            Time for the learning rates, by default `step`.
        """
        rates = self.rates(clock or RateClock(step))
        expect("scale", scale, math.isfinite(scale), "a finite number (leave out a step whose gradient is not)")
        self._reserved = None  # back to the memory pool: it then has room for the tables of scalars
        with np.errstate(over="ignore", invalid="ignore"):  # the next loss is not finite, as all ranks will find
            self._update(pieces, step, float(scale), rates, gather)

    def _update(
        self, pieces: Sequence[OptimizerSpan], step: int, scale: float, rates: Sequence[float], gather: Gather | None
    ) -> None:
        for piece in pieces:
            runs = self._runs(piece)
            scalars = {
                tuning: self._scalars(step, scale, rates[tuning.number], tuning)
                for tuning in {tuning for tuning, _ in runs}
            }
            self._update_runs(piece, step, [scalars[tuning] for tuning, _ in runs])

    def _update_runs(self, piece: OptimizerSpan, step: int, scalars: Sequence[Scalars]) -> None:
        """Update the runs of a span, with scalars for each, and finish them: on the host a portion at once."""
        on_host = isinstance(piece.weights, np.ndarray)
        for part, some, trains in self._parts(piece, scalars):
            if trains:
                self._portion(piece, part, some)
            if on_host:  # while it is in the cache
                self._finish(piece, part, step)
        if not on_host:
            self._finish(piece, slice(piece.span.size), step)

    def _parts(self, piece: OptimizerSpan, scalars: Sequence[Scalars]) -> Iterator[tuple[slice, Any, bool]]:
        """Elements of each call of a formula for the runs of a span, its scalars, and whether they are updated.

        A call is for a portion of a run or, compiled on a GPU, for all runs, as far as scratch memory goes.
        """
        runs, step = self._runs(piece), portion_of(piece.weights, self.formula())
        if isinstance(piece.weights, np.ndarray) or not runs_compiled(self.formula(), piece.weights):
            for (tuning, one), some in zip(runs, scalars, strict=True):
                yield from ((part, some, tuning.trains) for part in portions(one.start, one.stop, step))
            return
        updated = [some if tuning.trains else None for (tuning, _), some in zip(runs, scalars, strict=True)]
        together = RunScalars(updated, self._numbers(piece))  # one launch for all: each has a fixed cost
        for part in portions(0, piece.span.size, step if self.spare_rows else piece.span.size):
            yield part, together.of_blocks(part), True

    def _runs(self, piece: OptimizerSpan) -> Runs:
        """Runs of neighbouring tensors of a span with the same hyperparameters, in order. Cached while these hold."""
        logical = [run.place.parameter.logical for run in piece.tensors]
        key = self.decay, *[one.requires_grad and (one.decay, piece.missed.get(one, 0)) for one in logical]
        if self._known_runs.get(piece, (None, ()))[0] != key:
            self._known_runs[piece] = key, tuple(self._joined(piece))
            self._known_numbers.pop(piece, None)
        return self._known_runs[piece][1]

    def _joined(self, piece: OptimizerSpan) -> Iterator[tuple[Tuning, ElementRun]]:
        groups = groupby(piece.tensors, lambda run: self._tuning(piece, run))
        joined = ((tuning, list(tensors)) for tuning, tensors in groups)
        return ((tuning, some[0]._replace(stop=some[-1].stop)) for tuning, some in joined)

    def _tuning(self, piece: OptimizerSpan, run: ElementRun) -> Tuning:
        return self._table.tuning(run.place.parameter, self.decay, piece.missed)

    def _numbers(self, piece: OptimizerSpan) -> Array:
        """Number of the run of each block of a span, on its device."""
        runs = self._runs(piece)
        if piece not in self._known_numbers:
            lengths = [run.stop - run.start for _, run in runs]
            self._known_numbers[piece] = device_updates.run_numbers(lengths)
        return self._known_numbers[piece]

    def _finish(self, piece: OptimizerSpan, part: slice, step: int) -> None:
        """Round updated weights to their storage precision, and add them to their moving average."""
        weights = piece.weights[part]
        if piece.stored is not None:
            piece.stored[part] = weights
        if self.ema:
            keep, gain = (self.ema, 1.0 - self.ema) if step else (0.0, 1.0)
            some: Any = Scalars(keep=keep, gain1=gain)
            if not isinstance(weights, np.ndarray):  # all runs of the span
                some = RunScalars([some] * len(self._runs(piece)), self._numbers(piece))
            run(average, some, weights, piece.state[EMA][part])

    def _portion(self, piece: OptimizerSpan, part: slice, scalars: Any) -> None:
        """Update weights and state of the elements `part` of a span, a portion that fits the cache."""
        moments = (piece.state[name][part] for name in self.moments())
        run(self.formula(), scalars, piece.weights[part], piece.gradient[part], *moments)

    def formula(self) -> Formula:
        """Update formula: a function of weights, gradient (before ``s.scale``), `moments`, and `s`, the `scalars`."""
        raise NotImplementedError

    def scalars(self, step: int, scale: float, rate: float, decay: float) -> Scalars:
        """Scalars of the formula. `step` is the number of earlier updates of the parameters."""
        return Scalars(scale, rate, decay)

    def _scalars(self, step: int, scale: float, rate: float, tuning: Tuning) -> Scalars:
        return Scalars(*map(float, self.scalars(step - tuning.missed, scale, rate, tuning.decay)))

    def reserve(self, pieces: Sequence[OptimizerSpan]) -> None:
        """Allocate what `update` of these spans needs. MemoryError if there is no room."""
        for piece in pieces:
            self._workspace(piece.weights)
            if not isinstance(piece.weights, np.ndarray):
                if not runs_compiled(self.formula(), piece.weights):
                    size = min(piece.span.size, portion_of(piece.weights))
                    np.empty_like(piece.weights, shape=TEMPORARIES * size)  # its memory is free for the update
                self._numbers(piece)
                table = device_updates.empty_table(len(self._runs(piece)), piece.weights.dtype)
                if self._reserved is None or table.nbytes > self._reserved.nbytes:
                    self._reserved = table

    def _workspace(self, like: Array) -> Array:
        """Scratch array of shape (rows, elements per call), made once per array type and dtype."""
        key = type(like), like.dtype.str
        if key not in self._spare:
            self._spare[key] = np.empty_like(like, shape=(self.spare_rows, portion_of(like)))
        return self._spare[key]


def portion_of(vector: Array, formula: Formula = average) -> int:
    """Elements of a vector for each call of a formula, by default of a compiled one."""
    if not isinstance(vector, np.ndarray):
        return PORTION["device"]
    return PORTION["host"] if runs_compiled(formula, vector) else min(PORTION["host"], PORTION["NumPy"])


def portions(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, stop)) for at in range(start, stop, max(step, 1)))


def expect(name: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{name}: expected {expected}, found {value}")
