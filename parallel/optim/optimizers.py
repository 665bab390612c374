"""Optimizers on the spans of the flat vector that a rank owns. Imports no MPI.

An optimiser walks over its pieces in portions that fit into the cache: gradient, state and weights of a portion are
read once and written once, and half-precision weights are rounded from the master while it is still in the cache. No
element's update depends on where pieces or portions begin, so any division of the vector gives the same bits. What
concerns many elements, a norm, is made of float64 sums of the squares of every block, gathered from all ranks and added
up in the order of the vector.

Parameters with ``decay=False`` (biases and gains) are left out of weight decay.

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

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np

from parallel.nn.flat_params import BLOCK, ParamSpan, Span
from parallel.optim.kernels import kernels
from parallel.optim.lr_schedules import Rate, describe, rate_at
from quant.types import Array

Gather = Callable[[np.ndarray], np.ndarray]
"""From one float64 for each block of this rank's pieces, in their order, to one for each block of the whole vector, in
its order: the same on all ranks."""

PORTION = {"host": 1 << 14, "device": 1 << 24}
"""Elements at a time. On a host seven float32 vectors of them fit into half a megabyte of cache; to a GPU every call
costs more than its memory traffic if it is small."""


class ElementRun(NamedTuple):
    """Neighbouring elements of a piece that are treated alike: from `start` to `stop`, counted from its beginning."""

    start: int
    stop: int
    decays: bool
    place: ParamSpan


@dataclass(eq=False)
class OptimizerSpan:
    """A span of the flat vector that this rank updates, and what lies there.

    Parameters
    ----------
    span : Span
    weights : array, shape (span.size,), float32 or float64
        The master: the weights themselves, or the float32 that half-precision weights are rounded from.
    gradient : array like weights
        Sum over samples, not yet divided by anything; only read. Zero in the filling between tensors.
    state : dict of arrays like weights
        As `Optimizer.fresh` makes them.
    places : iterable of ParamSpan
        At least those that the span touches; the others are forgotten.
    stored : array, shape (span.size,), of a half type, optional
        The weights as operators see them; written along with the master.

    Raises
    ------
    ValueError
        If shapes, types or the span do not fit.
    """

    span: Span
    weights: Array
    gradient: Array
    state: dict[str, Array]
    places: Iterable[ParamSpan]
    stored: Array | None = None
    runs: tuple[ElementRun, ...] = field(init=False, repr=False)
    tensors: tuple[ElementRun, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        start, stop = self.span
        if start % BLOCK or stop % BLOCK or stop < start:
            raise ValueError(f"span: expected whole blocks of {BLOCK} elements, found {start} to {stop}")
        if self.weights.dtype not in (np.float32, np.float64):
            raise ValueError(f"weights: expected float32 or float64, found {self.weights.dtype}")
        for name, vector in {"weights": self.weights, "gradient": self.gradient, **self.state}.items():
            if vector.shape != (self.span.size,) or vector.dtype != self.weights.dtype:
                expected = f"{self.weights.dtype} of shape ({self.span.size},)"
                raise ValueError(f"{name}: expected {expected}, found {vector.dtype} of shape {vector.shape}")
        if self.stored is not None and self.stored.shape != (self.span.size,):
            raise ValueError(f"stored: expected shape ({self.span.size},), found {self.stored.shape}")
        self.places = tuple(p for p in self.places if max(p.span.start, start) < min(p.span.stop, stop))
        self.tensors = tuple(
            ElementRun(
                max(place.span.start, start) - start, min(place.span.stop, stop) - start, place.parameter.decay, place
            )
            for place in self.places
        )
        if sum(run.stop - run.start for run in self.tensors) != self.span.size:
            raise ValueError(f"places: expected tensors that fill {start} to {stop} exactly, found {self.places}")
        self.runs = tuple(_joined(self.tensors))


def _joined(tensors: Iterable[ElementRun]) -> Iterator[ElementRun]:
    """Neighbours that decay alike, as one run."""
    last: ElementRun | None = None
    for run in tensors:
        if last is not None and last.decays == run.decays and last.stop == run.start:
            last = last._replace(stop=run.stop)
        else:
            if last is not None:
                yield last
            last = run
    if last is not None:
        yield last


@dataclass(kw_only=True, eq=False)
class Optimizer:
    """Base class: learning rate, weight decay, and the loop over spans.

    Parameters
    ----------
    rate : float or callable
        The learning rate, or a schedule: from the number of updates made before, to the rate of this one.
    decay : float
        Weight decay, of parameters that have ``decay=True``.

    Raises
    ------
    ValueError
        For hyperparameters out of range.
    """

    rate: Rate
    decay: float = 0.0
    _spare: dict[tuple[type, str], Array] = field(default_factory=dict, init=False, repr=False)

    STATES: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not callable(self.rate):
            _check("rate", self.rate, 0 <= self.rate < math.inf, "a number from 0 on, or a schedule")
        _check("decay", self.decay, 0 <= self.decay < math.inf, "a number from 0 on")

    def states(self) -> tuple[str, ...]:
        """Names of the state vectors."""
        return self.STATES

    def fresh(self, weights: Array) -> dict[str, Array]:
        """The state of a piece before the first update: zeros like its master weights, where these are."""
        return {name: np.zeros_like(weights) for name in self.states()}

    def describe(self) -> dict[str, Any]:
        """Name and hyperparameters, as a checkpoint keeps them."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {"name": NAMES.get(type(self), type(self).__name__), **settings, "rate": describe(self.rate)}

    def update(self, pieces: Sequence[OptimizerSpan], step: int, scale: float, gather: Gather | None = None) -> None:
        """Make one step: change weights, state and stored weights of these pieces.

        Parameters
        ----------
        pieces : sequence of OptimizerSpan
            Of this rank; there may be none, and empty ones.
        step : int
            Updates made before this one.
        scale : float
            What the gradients are multiplied with: 1 / (global count x loss scale) x clip factor. It must be finite:
            a step whose gradient is not is left out by not calling this.
        gather : callable
            Collective: all ranks update together. Only LAMB asks.

        Raises
        ------
        ValueError
            If `step` is negative, or `scale` or the rate is not finite; nothing was changed.
        """
        rate = rate_at(self.rate, step)
        _check("scale", scale, math.isfinite(scale), "a finite number (leave out a step whose gradient is not)")
        with np.errstate(over="ignore", invalid="ignore"):  # the next loss is no finite number, which all ranks find
            self._update(pieces, step, float(scale), rate, gather)

    def _update(
        self, pieces: Sequence[OptimizerSpan], step: int, scale: float, rate: float, gather: Gather | None
    ) -> None:
        for piece in pieces:
            spare = self._workspace(piece.weights)
            for run in piece.runs:
                decay = self.decay if run.decays else 0.0
                for part in _portions(run, spare):
                    self._portion(piece, part, spare, step, scale, rate, decay)
                    _store(piece, part)

    def _portion(
        self, piece: OptimizerSpan, part: slice, spare: Array, step: int, scale: float, rate: float, decay: float
    ) -> None:
        """Update the weights and the state of a few elements."""
        raise NotImplementedError

    def _workspace(self, like: Array) -> Array:
        """Two rows of a portion each, made once for every kind of array."""
        key = type(like), like.dtype.str
        if key not in self._spare:
            portion = PORTION["host" if isinstance(like, np.ndarray) else "device"]
            self._spare[key] = np.empty_like(like, shape=(2, portion))
        return self._spare[key]


def _portions(run: ElementRun, spare: Array) -> Iterator[slice]:
    step = spare.shape[1]
    return (slice(start, min(start + step, run.stop)) for start in range(run.start, run.stop, step))


def _store(piece: OptimizerSpan, part: slice) -> None:
    if piece.stored is not None:
        piece.stored[part] = piece.weights[part]


def _check(name: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{name}: expected {expected}, found {value}")


@dataclass(kw_only=True, eq=False)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum and Nesterov's look ahead (Sutskever et al., ICML 2013).

    The velocity holds gradients, not steps, so that a change of rate takes effect at once.

    Parameters
    ----------
    momentum : float
        Without it there is no state.
    nesterov : bool
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("momentum", self.momentum, 0 <= self.momentum < 1, "0 <= momentum < 1")
        _check(
            "nesterov", self.nesterov, not self.nesterov or self.momentum > 0, "momentum, where nesterov is asked for"
        )

    def states(self) -> tuple[str, ...]:
        """The velocity, if there is momentum."""
        return ("velocity",) if self.momentum else ()

    def _portion(self, piece, part, spare, step, scale, rate, decay):
        use, weights, gradient = kernels(piece.weights), piece.weights[part], piece.gradient[part]
        if self.momentum:
            velocity = piece.state["velocity"][part]
            use.momentum(weights, gradient, velocity, spare, scale, rate, self.momentum, self.nesterov, decay)
        else:
            use.sgd(weights, gradient, spare, scale, rate, decay)


@dataclass(kw_only=True, eq=False)
class Adam(Optimizer):
    """Adaptive moments (Kingma and Ba, ICLR 2015, algorithm 1); decay is added to the gradient.

    Parameters
    ----------
    beta1, beta2 : float
        Decay of the two moments.
    eps : float
        Added to the root of the second.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    STATES: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("beta1", self.beta1, 0 <= self.beta1 < 1, "0 <= beta1 < 1")
        _check("beta2", self.beta2, 0 <= self.beta2 < 1, "0 <= beta2 < 1")
        _check("eps", self.eps, 1e-30 <= self.eps < math.inf, "a number from 1e-30 on")  # not 0 in float32

    def _corrections(self, step: int) -> tuple[float, float]:
        """Bias corrections of the two moments."""
        return 1.0 - self.beta1 ** (step + 1), 1.0 - self.beta2 ** (step + 1)

    def _portion(self, piece, part, spare, step, scale, rate, decay):
        kernel = getattr(kernels(piece.weights), NAMES[type(self)])
        vectors = piece.weights[part], piece.gradient[part], piece.state["m"][part], piece.state["v"][part]
        numbers = scale, rate, self.beta1, self.beta2, self.eps, decay, *self._corrections(step)
        kernel(*vectors, spare, *numbers)


@dataclass(kw_only=True, eq=False)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019, algorithm 2): w -= rate decay w."""

    decay: float = 0.01


@dataclass(kw_only=True, eq=False)
class LAMB(Adam):
    """Adam's direction, as long as the tensor's weights (You et al., ICLR 2020, algorithm 2).

    With u = m^ / (sqrt(v^) + eps) + decay w, w -= rate phi(|w|) / |u| u; where |w| or |u| is zero the rate is taken as
    it is, so that a tensor can leave zero. Norms are over whole tensors.

    Parameters
    ----------
    low, high : float
        phi(z) = min(max(z, low), high).
    """

    eps: float = 1e-6
    decay: float = 0.01
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("low, high", (self.low, self.high), 0 <= self.low <= self.high and self.high > 0, "0 <= low <= high > 0")

    def _update(self, pieces, step, scale, rate, gather):
        if gather is None:
            raise ValueError("gather: LAMB needs the block sums of all ranks, found None")
        weights, directions = [np.zeros(0)], [np.zeros(0)]
        corrections = self._corrections(step)
        for piece in pieces:
            use, spare, m, v = self._of(piece)
            weights.append(block_squares(piece.weights))
            for run in piece.tensors:
                decay = self.decay if run.decays else 0.0
                for part in _portions(run, spare):
                    use.lamb_moments(piece.gradient[part], m[part], v[part], spare, scale, self.beta1, self.beta2)
                    u = use.lamb_direction(piece.weights[part], m[part], v[part], spare, self.eps, decay, *corrections)
                    directions.append(block_squares(u))
        of_weights, of_directions = gather(np.concatenate(weights)), gather(np.concatenate(directions))
        for piece in pieces:
            use, spare, m, v = self._of(piece)
            for run in piece.tensors:
                own = rate * self._trust(run.place, of_weights, of_directions)
                decay = self.decay if run.decays else 0.0
                for part in _portions(run, spare):
                    use.lamb(piece.weights[part], m[part], v[part], spare, own, self.eps, decay, *corrections)
                    _store(piece, part)

    def _of(self, piece: OptimizerSpan) -> tuple[Any, Array, Array, Array]:
        return kernels(piece.weights), self._workspace(piece.weights), piece.state["m"], piece.state["v"]

    def _trust(self, place: ParamSpan, of_weights: np.ndarray, of_directions: np.ndarray) -> float:
        blocks = slice(place.span.start // BLOCK, place.span.stop // BLOCK)
        weights, direction = (math.sqrt(total(sums[blocks])) for sums in (of_weights, of_directions))
        if weights == 0 or direction == 0:
            return 1.0
        return min(max(weights, self.low), self.high) / direction


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "lamb": LAMB}
"""By the name that a checkpoint and a command line use."""

NAMES = {optimizer: name for name, optimizer in OPTIMIZERS.items()}


def block_squares(vector: Array) -> np.ndarray:
    """The sum of the squares of each block of 256 elements, on the host.

    Parameters
    ----------
    vector : array of float32 or float64, whole blocks

    Returns
    -------
    float64 array, shape (len(vector) / 256,)
        Every block is added up by the same tree, wherever it lies; inf or NaN where the block has one (or, in float64,
        where squares exceed 1e308).
    """
    if vector.ndim != 1 or len(vector) % BLOCK:
        raise ValueError(f"vector: expected one dimension and whole blocks of {BLOCK}, found shape {vector.shape}")
    step = PORTION["host" if isinstance(vector, np.ndarray) else "device"]
    sums = np.empty_like(vector, shape=len(vector) // BLOCK, dtype=np.float64)
    spare = np.empty_like(vector, shape=min(step, len(vector)), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # who reads the sums decides what that means
        for start in range(0, len(vector), step):
            x = vector[start : start + step]
            kernels(vector).squares(x, BLOCK, spare, sums[start // BLOCK : (start + len(x)) // BLOCK])
    return sums if isinstance(sums, np.ndarray) else sums.get()


def total(sums: np.ndarray) -> float:
    """The sum of block sums, always in the same order."""
    return float(np.add.reduce(np.ascontiguousarray(sums, np.float64)))


class GradClip(NamedTuple):
    """Gradient norm and clip factor of a step.

    Attributes
    ----------
    norm : float
        Of the gradient after scaling; inf or NaN if the step must be left out.
    factor : float
        What to multiply `scale` with so that the norm is at most the limit: 1 where it is already. 0 if the norm is
        not finite.
    """

    norm: float
    factor: float


def clip_factor(squares: np.ndarray, scale: float, limit: float | None) -> GradClip:
    """Clipping by the global norm (Pascanu et al., ICML 2013), from the block sums of the whole vector.

    Parameters
    ----------
    squares : float64 array
        As `block_squares` makes them, of the gradient before scaling, of all blocks of all ranks in order.
    scale : float
        1 / (global count x loss scale).
    limit : float or None
        None for no clipping.

    Examples
    --------
    >>> clip_factor(np.array([9.0, 16.0]), 1.0, 2.5)
    GradClip(norm=5.0, factor=0.5)
    """
    _check("limit", limit, limit is None or limit > 0, "a positive number, or None")
    with np.errstate(over="ignore", invalid="ignore"):
        norm = math.sqrt(total(squares)) * scale
    if not math.isfinite(norm):
        return GradClip(norm, 0.0)
    return GradClip(norm, 1.0 if limit is None or norm <= limit else limit / norm)
