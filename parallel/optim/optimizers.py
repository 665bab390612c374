"""Optimizers (SGD, Adam, AdamW, LAMB) that update the spans of the flat vector that a rank owns. Imports no MPI.

Constructors take PyTorch's names as well: `lr`, `weight_decay`, `betas`. Frozen parameters (`requires_grad` is False)
and their state are not updated.

Spans are updated in portions that fit the cache. No element's update depends on where spans or portions begin, so every
division of the vector gives the same bits; norms are float64 sums of squares per block, gathered from all ranks and
added in the order of the vector. Parameters with ``decay=False`` (biases and gains) have no weight decay.

>>> import numpy as np
>>> from parallel.nn.flat_params import BLOCK, ParamSpan, Span
>>> from parallel.nn.operator import Parameter, constant
>>> place = ParamSpan(Parameter((3,), constant(1.0)), Span(0, BLOCK))
>>> optimizer = SGD(rate=0.5)
>>> piece = OptimizerSpan(Span(0, BLOCK), np.ones(BLOCK), np.full(BLOCK, 4.0), optimizer.fresh(np.ones(BLOCK)), [place])
>>> optimizer.update([piece], step=0, scale=0.25)
>>> piece.weights[:3].tolist()
[0.5, 0.5, 0.5]
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from parallel.nn.flat_params import BLOCK, ParamSpan
from parallel.nn.operator import Parameter
from parallel.optim.kernels import kernels
from parallel.optim.kernels.reference_updates import Scalars
from parallel.optim.lr_schedules import Rate, describe
from parallel.optim.optimizer_span import ElementRun, OptimizerSpan
from parallel.optim.param_groups import GroupTable, ParamGroup, RateClock, TorchNames, Tuning
from quant.types import Array

Gather = Callable[[np.ndarray], np.ndarray]
"""Block sums of all ranks, in the order of the vector, from those of this rank's spans; the same on all ranks."""

EMA = "ema"
"""State vector: moving average of the weights."""

PORTION = {"host": 1 << 14, "device": 1 << 24}
"""Elements per kernel call. Seven float32 vectors of the host's portion fit into half a megabyte of cache; on a GPU a
small call costs more than its memory traffic."""


Runs = tuple[tuple[Tuning, ElementRun], ...]
"""Runs of elements with the same hyperparameters."""


@dataclass(kw_only=True, eq=False)
class Optimizer(metaclass=TorchNames):
    """Base class of optimizers: hyperparameters, and the loop over spans. ValueError for values out of range.

    Parameters
    ----------
    rate, lr : float, or function of the number of earlier updates
    decay, weight_decay : float
        Applies to parameters that have ``decay=True``.
    groups : sequence of ParamGroup, or of dicts as in PyTorch
        Parameters with other values; the first group that has a parameter counts.
    ema : float
        Decay of a moving average of the weights, from 0 (none) to below 1: the state vector "ema", equal to the weights
        after the first update, then ema = decay ema + (1 - decay) w after each (Polyak and Juditsky 1992).
    """

    rate: Rate
    decay: float = 0.0
    groups: Sequence[ParamGroup | Mapping[str, Any]] = ()
    ema: float = 0.0
    _table: GroupTable = field(init=False, repr=False)
    _known_runs: WeakKeyDictionary[OptimizerSpan, tuple[Any, Runs]] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )
    _spare: dict[tuple[type, str], Array] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.rate):
            _check("rate", self.rate, 0 <= self.rate < math.inf, "a number from 0 on, or a schedule")
        _check("decay", self.decay, 0 <= self.decay < math.inf, "a number from 0 on")
        _check("ema", self.ema, 0 <= self.ema < 1, "0 <= ema < 1")
        groups = tuple(one if isinstance(one, ParamGroup) else ParamGroup(**one) for one in self.groups)
        self.groups, self._table = groups, GroupTable(groups)

    @property
    def lr(self) -> Rate:
        """Learning rate by PyTorch's name."""
        return self.rate

    @lr.setter
    def lr(self, rate: Rate) -> None:
        self.rate = rate

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

    def describe(self) -> dict[str, Any]:
        """Optimizer name and hyperparameters, for a checkpoint."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        own = {"rate": describe(self.rate), "groups": [group.describe() for group in self._table.groups]}
        return {"name": NAMES.get(type(self), type(self).__name__), **settings, **own}

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
            Factor of the gradients: 1 / (global count x loss scale) x clip factor. Must be finite: do not call this for
            a step whose gradient is not. ValueError otherwise; nothing is changed.
        gather : callable
            Collective; only LAMB needs it.
        clock : RateClock
            Time for the learning rates, by default `step`.
        """
        rates = self._table.rates(self.rate, clock or RateClock(step))
        _check("scale", scale, math.isfinite(scale), "a finite number (leave out a step whose gradient is not)")
        with np.errstate(over="ignore", invalid="ignore"):  # the next loss is not finite, as all ranks will find
            self._update(pieces, step, float(scale), rates, gather)

    def _update(
        self, pieces: Sequence[OptimizerSpan], step: int, scale: float, rates: Sequence[float], gather: Gather | None
    ) -> None:
        for piece in pieces:
            spare = self._workspace(piece.weights)
            for tuning, run in self._runs(piece):
                scalars = self._scalars(step, scale, rates[tuning.number], tuning.decay)
                for part in _portions(run, spare):
                    if tuning.trains:
                        self._portion(piece, part, spare, scalars)
                    self._finish(piece, part, step, spare)

    def _runs(self, piece: OptimizerSpan) -> Runs:
        """Runs of neighbouring tensors of a span with the same hyperparameters, in order; cached while these hold."""
        key = self.decay, *[run.place.parameter.requires_grad for run in piece.tensors]
        if self._known_runs.get(piece, (None, ()))[0] != key:
            groups = groupby(piece.tensors, lambda run: self._table.tuning(run.place.parameter, self.decay))
            joined = ((tuning, list(tensors)) for tuning, tensors in groups)
            runs = tuple((tuning, some[0]._replace(stop=some[-1].stop)) for tuning, some in joined)
            self._known_runs[piece] = key, runs
        return self._known_runs[piece][1]

    def _finish(self, piece: OptimizerSpan, part: slice, step: int, spare: Array) -> None:
        """Round updated weights to their storage precision, and add them to their moving average."""
        weights = piece.weights[part]
        if piece.stored is not None:
            piece.stored[part] = weights
        if self.ema:
            average, new = piece.state[EMA][part], spare[0, : len(weights)]
            np.multiply(weights, 1.0 - self.ema if step else 1.0, out=new)
            np.multiply(average, self.ema if step else 0.0, out=average)
            np.add(average, new, out=average)

    def _portion(self, piece: OptimizerSpan, part: slice, spare: Array, scalars: Scalars) -> None:
        """Update weights and state of the elements `part` of a span, a portion that fits the cache."""
        raise NotImplementedError

    def _scalars(self, step: int, scale: float, rate: float, decay: float) -> Scalars:
        """Scalar arguments of the update kernels for a run of elements; all floats, so that numba compiles once."""
        return tuple(map(float, (scale, rate, decay, *self._hyperparameters(step))))

    def _hyperparameters(self, step: int) -> Scalars:
        """Scalar kernel arguments that follow scale, rate and decay, such as beta1 and beta2."""
        return ()

    def _workspace(self, like: Array) -> Array:
        """Scratch array of shape (2, elements per kernel call), made once per array type and dtype."""
        key = type(like), like.dtype.str
        if key not in self._spare:
            self._spare[key] = np.empty_like(like, shape=(2, _portion_of(like)))
        return self._spare[key]


def _portion_of(vector: Array) -> int:
    return PORTION["host" if isinstance(vector, np.ndarray) else "device"]


def _portions(run: ElementRun, spare: Array) -> Iterator[slice]:
    step = spare.shape[1]
    return (slice(start, min(start + step, run.stop)) for start in range(run.start, run.stop, step))


def _check(name: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{name}: expected {expected}, found {value}")


@dataclass(kw_only=True, eq=False)
class SGD(Optimizer):
    """Stochastic gradient descent, optionally with momentum or Nesterov momentum (Sutskever et al., ICML 2013).

    The velocity sums gradients, not steps, so a change of rate acts at once. Without momentum there is no state.
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("momentum", self.momentum, 0 <= self.momentum < 1, "0 <= momentum < 1")
        good = not self.nesterov or self.momentum > 0
        _check("nesterov", self.nesterov, good, "momentum, where nesterov is asked for")

    def moments(self) -> tuple[str, ...]:
        return ("velocity",) if self.momentum else ()

    def _hyperparameters(self, step):
        return (self.momentum,) if self.momentum else ()

    def _portion(self, piece, part, spare, scalars):
        use, weights, gradient = kernels(piece.weights), piece.weights[part], piece.gradient[part]
        if self.momentum:
            use.momentum(weights, gradient, piece.state["velocity"][part], spare, scalars, self.nesterov)
        else:
            use.sgd(weights, gradient, spare, scalars)


@dataclass(kw_only=True, eq=False)
class Adam(Optimizer):
    """Adam optimizer (Kingma and Ba, ICLR 2015, algorithm 1); weight decay is added to the gradient (L2).

    `beta1` and `beta2`, or the pair `betas`, are the decay of the moments; `eps` is added to the root of the second.
    """

    kernel: ClassVar[str] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("beta1", self.beta1, 0 <= self.beta1 < 1, "0 <= beta1 < 1")
        _check("beta2", self.beta2, 0 <= self.beta2 < 1, "0 <= beta2 < 1")
        _check("eps", self.eps, 1e-30 <= self.eps < math.inf, "a number from 1e-30 on")  # not 0 in float32

    def moments(self) -> tuple[str, ...]:
        return ("m", "v")

    def _hyperparameters(self, step):
        corrections = (1.0 - beta ** (step + 1) for beta in (self.beta1, self.beta2))
        return self.beta1, self.beta2, self.eps, *corrections

    def _portion(self, piece, part, spare, scalars):
        kernel = getattr(kernels(piece.weights), self.kernel)
        m, v = piece.state["m"][part], piece.state["v"][part]
        kernel(piece.weights[part], piece.gradient[part], m, v, spare, scalars)


@dataclass(kw_only=True, eq=False)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019, algorithm 2): w -= rate decay w."""

    kernel: ClassVar[str] = "adamw"
    decay: float = 0.01


@dataclass(kw_only=True, eq=False)
class LAMB(Adam):
    """LAMB optimizer: Adam's step, scaled to the norm of each tensor's weights (You et al., ICLR 2020, algorithm 2).

    With u = m^ / (sqrt(v^) + eps) + decay w, w -= rate |w| / |u| u. Where |w| or |u| is zero the factor is 1, so that a
    tensor can leave zero. Norms are over whole tensors.
    """

    eps: float = 1e-6
    decay: float = 0.01

    def _update(self, pieces, step, scale, rates, gather):
        if gather is None:
            raise ValueError("gather: LAMB needs the block sums of all ranks, found None")
        weights, directions = [np.zeros(0)], [np.zeros(0)]
        for piece in pieces:
            use, m, v = kernels(piece.weights), piece.state["m"], piece.state["v"]
            spare = self._workspace(piece.weights)
            weights.append(block_squares(piece.weights))
            for run, tuning in self._tensors(piece):
                if not tuning.trains:
                    directions.append(np.zeros((run.stop - run.start) // BLOCK))
                    continue
                scalars = self._scalars(step, scale, rates[tuning.number], tuning.decay)
                for part in _portions(run, spare):
                    use.lamb_moments(piece.gradient[part], m[part], v[part], spare, scalars)
                    u = use.lamb_direction(piece.weights[part], m[part], v[part], spare, scalars)
                    directions.append(block_squares(u))
        of_weights, of_directions = gather(np.concatenate(weights)), gather(np.concatenate(directions))
        for piece in pieces:
            use, m, v = kernels(piece.weights), piece.state["m"], piece.state["v"]
            spare = self._workspace(piece.weights)
            for run, tuning in self._tensors(piece):
                trust = _trust(run.place, of_weights, of_directions)
                scalars = self._scalars(step, scale, rates[tuning.number] * trust, tuning.decay)
                for part in _portions(run, spare):
                    if tuning.trains:
                        use.lamb(piece.weights[part], m[part], v[part], spare, scalars)
                    self._finish(piece, part, step, spare)

    def _tensors(self, piece: OptimizerSpan) -> Iterator[tuple[ElementRun, Tuning]]:
        return ((run, self._table.tuning(run.place.parameter, self.decay)) for run in piece.tensors)


def _trust(place: ParamSpan, of_weights: np.ndarray, of_directions: np.ndarray) -> float:
    """LAMB's trust ratio |w| / |u| of a tensor (1 if either is 0), from sums of squares per block of all ranks."""
    blocks = slice(place.span.start // BLOCK, place.span.stop // BLOCK)
    weights, direction = (math.sqrt(total(sums[blocks])) for sums in (of_weights, of_directions))
    return weights / direction if weights and direction else 1.0


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "lamb": LAMB}
"""By name in checkpoints and on command lines."""

NAMES = {optimizer: name for name, optimizer in OPTIMIZERS.items()}


def block_squares(vector: Array) -> np.ndarray:
    """Sums of squares of each block of 256 elements: a NumPy array, float64, of shape (len(vector) / 256,).

    `vector` has whole blocks of float32 or float64. Each block is added by the same tree, wherever it lies; inf or NaN
    where the block has one (or, in float64, where squares exceed 1e308).
    """
    if vector.ndim != 1 or len(vector) % BLOCK:
        raise ValueError(f"vector: expected one dimension and whole blocks of {BLOCK}, found shape {vector.shape}")
    step, sums = _portion_of(vector), np.empty_like(vector, shape=len(vector) // BLOCK, dtype=np.float64)
    spare = np.empty_like(vector, shape=min(step, len(vector)), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the sums
        for start in range(0, len(vector), step):
            x = vector[start : start + step]
            kernels(vector).squares(x, BLOCK, spare, sums[start // BLOCK : (start + len(x)) // BLOCK])
    return sums if isinstance(sums, np.ndarray) else sums.get()


def total(sums: np.ndarray) -> float:
    """Sum of an array of block sums, always added in the same order."""
    return float(np.add.reduce(np.ascontiguousarray(sums, np.float64)))


class GradClip(NamedTuple):
    """Global gradient norm of a step (if inf or NaN, skip the step), and the factor by which to clip the gradient.

    The factor is 1 for a norm up to the limit, and 0 if the norm is not finite.
    """

    norm: float
    factor: float


def clip_factor(squares: np.ndarray, scale: float, limit: float | None) -> GradClip:
    """Compute the global gradient norm and the factor that clips it to `limit` (Pascanu et al., ICML 2013).

    `squares` are the `block_squares` of all ranks, of the gradient before it is multiplied by `scale`, which is
    1 / (global count x loss scale); without a `limit` nothing is clipped.

    >>> clip_factor(np.array([9.0, 16.0]), 1.0, 2.5)
    GradClip(norm=5.0, factor=0.5)
    """
    _check("limit", limit, limit is None or limit > 0, "a positive number, or None")
    with np.errstate(over="ignore", invalid="ignore"):
        norm = math.sqrt(total(squares)) * scale
    if not math.isfinite(norm):
        return GradClip(norm, 0.0)
    return GradClip(norm, 1.0 if limit is None or norm <= limit else limit / norm)
