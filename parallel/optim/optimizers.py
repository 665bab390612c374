"""Optimizers: SGD, Adam, AdamW, LAMB. Each is a formula, a class, and an entry of `OPTIMIZERS`.

In the formulas, ``s.scale * gradient`` is the gradient of the papers, g. Those of `updates.h` (`compiled`) have equal
bits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Unpack

import numpy as np

from parallel.nn.flat_params import BLOCK, ParamSpan
from parallel.optim.grad_norm import block_squares, total
from parallel.optim.kernels.formulas import Formula, compiled, decayed, run
from parallel.optim.kernels.scalars import Scalars
from parallel.optim.optimizer import Optimizer, expect, number
from parallel.optim.optimizer_span import ElementRun, OptimizerSpan
from parallel.optim.param_groups import OptimizerArguments, Tuning
from quant.types import Array


@compiled
def sgd(w: Array, gradient: Array, s: Scalars) -> None:
    """Update by SGD without momentum: w -= rate (g + decay w)."""
    w -= s.rate * decayed(s.scale * gradient, w, s)


@compiled
def momentum(w: Array, gradient: Array, velocity: Array, s: Scalars) -> None:
    """Update by SGD with momentum: velocity = beta velocity + g + decay w, w -= rate velocity."""
    velocity[...] = s.beta * velocity + decayed(s.scale * gradient, w, s)
    w -= s.rate * velocity


@compiled
def nesterov(w: Array, gradient: Array, velocity: Array, s: Scalars) -> None:
    """Update by SGD with Nesterov momentum: velocity of `momentum`, w -= rate (g + decay w + beta velocity)."""
    g = decayed(s.scale * gradient, w, s)
    velocity[...] = s.beta * velocity + g
    w -= s.rate * (g + s.beta * velocity)


class SGDArguments(OptimizerArguments, total=False):
    """Keyword arguments of `SGD`, for type checkers."""

    momentum: float
    nesterov: bool


@dataclass(kw_only=True, eq=False)
class SGD(Optimizer):
    """Stochastic gradient descent, optionally with momentum or Nesterov momentum (Sutskever et al., ICML 2013).

    The velocity sums gradients, not steps, so a change of rate acts at once. Without momentum there is no state.
    """

    momentum: float = number(0.0, below=1)
    nesterov: bool = False

    if TYPE_CHECKING:

        def __init__(self, **given: Unpack[SGDArguments]) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        good = not self.nesterov or self.momentum > 0
        expect("nesterov", self.nesterov, good, "momentum, where nesterov is asked for")

    def moments(self) -> tuple[str, ...]:
        return ("velocity",) if self.momentum else ()

    def scalars(self, step: int, scale: float, rate: float, decay: float) -> Scalars:
        return Scalars(scale, rate, decay, beta=self.momentum)

    def formula(self) -> Formula:
        return nesterov if self.nesterov else momentum if self.momentum else sgd


def _moments(g: Array, m: Array, v: Array, s: Scalars) -> None:
    """Update Adam's moments: m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g g."""
    m += s.gain1 * (g - m)
    v += s.gain2 * (g * g - v)


def _normalized(m: Array, v: Array, s: Scalars) -> Array:
    """Adam's step without its rate and the correction of m: m / (sqrt(v^) + eps)."""
    return m / (s.root * np.sqrt(v) + s.eps)


@compiled
def adam(w: Array, gradient: Array, m: Array, v: Array, s: Scalars) -> None:
    """Update by Adam: w -= rate m^ / (sqrt(v^) + eps), bias-corrected.

    `keep`: 1 - rate decay in AdamW, otherwise 1.
    """
    _moments(decayed(s.scale * gradient, w, s), m, v, s)
    w[...] = s.keep * w - s.pace * _normalized(m, v, s)


class AdamArguments(OptimizerArguments, total=False):
    """Keyword arguments of the optimizers with two moments, for type checkers."""

    beta1: float
    beta2: float
    betas: tuple[float, float]
    eps: float


@dataclass(kw_only=True, eq=False)
class Adam(Optimizer):
    """Adam optimizer (Kingma and Ba, ICLR 2015, algorithm 1). Weight decay is added to the gradient (L2).

    `beta1` and `beta2`, or the pair `betas`, are the decay of the moments. `eps` is added to the root of the second.
    """

    is_decoupled: ClassVar[bool] = False
    """True if weight decay is a factor of the weights."""

    beta1: float = number(0.9, below=1)
    beta2: float = number(0.999, below=1)
    eps: float = number(1e-8, least=1e-30)  # not 0 in float32

    if TYPE_CHECKING:

        def __init__(self, **given: Unpack[AdamArguments]) -> None: ...

    @property
    def betas(self) -> tuple[float, float]:
        """`beta1` and `beta2`, by PyTorch's name."""
        return self.beta1, self.beta2

    @betas.setter
    def betas(self, pair: tuple[float, float]) -> None:
        made = replace(self, beta1=pair[0], beta2=pair[1])  # both are checked before one is set
        self.beta1, self.beta2 = made.beta1, made.beta2

    def moments(self) -> tuple[str, ...]:
        return ("m", "v")

    def scalars(self, step: int, scale: float, rate: float, decay: float) -> Scalars:
        correction1, correction2 = (1.0 - beta ** (step + 1) for beta in (self.beta1, self.beta2))
        return Scalars(
            scale,
            rate,
            0.0 if self.is_decoupled else decay,
            gain1=1.0 - self.beta1,
            gain2=1.0 - self.beta2,
            eps=self.eps,
            root=1.0 / math.sqrt(correction2),
            heal=1.0 / correction1,
            pace=rate / correction1,
            keep=1.0 - rate * decay if self.is_decoupled else 1.0,
        )

    def formula(self) -> Formula:
        return adam


@dataclass(kw_only=True, eq=False)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019, algorithm 2): w -= rate decay w."""

    is_decoupled: ClassVar[bool] = True
    decay: float = number(0.01)

    if TYPE_CHECKING:

        def __init__(self, **given: Unpack[AdamArguments]) -> None: ...


@compiled
def lamb_moments(gradient: Array, m: Array, v: Array, s: Scalars) -> None:
    """Update the moments m and v with g: first part of LAMB's step."""
    _moments(s.scale * gradient, m, v, s)


@compiled
def lamb_direction(w: Array, m: Array, v: Array, direction: Array, s: Scalars) -> None:
    """Write the unscaled LAMB step: m^ / (sqrt(v^) + eps) + decay w."""
    direction[...] = decayed(s.heal * _normalized(m, v, s), w, s)


@compiled
def lamb(w: Array, m: Array, v: Array, s: Scalars) -> None:
    """Update weights by LAMB, after `lamb_moments`: w -= rate `lamb_direction`. The rate includes the trust ratio."""
    w -= s.rate * decayed(s.heal * _normalized(m, v, s), w, s)


@dataclass(kw_only=True, eq=False)
class LAMB(Adam):
    """LAMB optimizer: Adam's step, scaled to the norm of each tensor's weights (You et al., ICLR 2020, algorithm 2).

    With u = m^ / (sqrt(v^) + eps) + decay w, w -= rate |w| / |u| u. Where |w| or |u| is zero the factor is 1, so that a
    tensor can leave zero. Norms are over whole tensors.
    """

    spare_rows: ClassVar[int] = 1
    whole_tensors: ClassVar[bool] = True
    eps: float = number(1e-6, least=1e-30)
    decay: float = number(0.01)

    if TYPE_CHECKING:

        def __init__(self, **given: Unpack[AdamArguments]) -> None: ...

    def _update(self, pieces, step, scale, rates, gather):
        if gather is None:
            raise ValueError("gather: LAMB needs the block sums of all ranks, found None")
        weights, directions = [np.zeros(0)], [np.zeros(0)]
        for piece in pieces:
            m, v, spare = piece.state["m"], piece.state["v"], self._workspace(piece.weights)[0]
            weights.append(block_squares(piece.weights))
            scalars = [self._scalars(step, scale, rates[tuning.number], tuning) for tuning, _ in self._runs(piece)]
            for part, some, trains in self._parts(piece, scalars):
                u = spare[: part.stop - part.start]
                u[...] = 0  # where a parameter is frozen
                if trains:
                    run(lamb_moments, some, piece.gradient[part], m[part], v[part])
                    run(lamb_direction, some, piece.weights[part], m[part], v[part], u)
                directions.append(block_squares(u))
        of_weights, of_directions = gather(np.concatenate(weights)), gather(np.concatenate(directions))
        for piece in pieces:
            trusts = [_trust(run.place, of_weights, of_directions) for _, run in self._runs(piece)]
            with_trust = [
                self._scalars(step, scale, rates[tuning.number] * trust, tuning)
                for (tuning, _), trust in zip(self._runs(piece), trusts)
            ]
            self._update_runs(piece, step, with_trust)

    def _joined(self, piece: OptimizerSpan) -> Iterator[tuple[Tuning, ElementRun]]:
        """Each tensor by itself, as the rate contains its trust ratio."""
        return ((self._tuning(piece, run), run) for run in piece.tensors)

    def _portion(self, piece, part, scalars):
        run(lamb, scalars, piece.weights[part], piece.state["m"][part], piece.state["v"][part])

    def formula(self) -> Formula:
        return lamb


def _trust(place: ParamSpan, of_weights: np.ndarray, of_directions: np.ndarray) -> float:
    """LAMB's trust ratio |w| / |u| of a tensor (1 if either is 0), from sums of squares per block of all ranks."""
    blocks = slice(place.span.start // BLOCK, place.span.stop // BLOCK)
    weights, direction = (math.sqrt(total(sums[blocks])) for sums in (of_weights, of_directions))
    return weights / direction if weights and direction else 1.0


OPTIMIZERS: dict[str, type[Optimizer]] = {kind.__name__.lower(): kind for kind in (SGD, Adam, AdamW, LAMB)}
"""By name in checkpoints and on command lines."""
