"""Update rules: SGD, Adam, AdamW, LAMB."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Unpack

import numpy as np

from parallel.nn.flat_params import BLOCK, ParamSpan
from parallel.optim.grad_norm import block_squares, total
from parallel.optim.kernels import kernels
from parallel.optim.optimizer import Optimizer, expect
from parallel.optim.optimizer_span import ElementRun, OptimizerSpan
from parallel.optim.param_groups import AdamArguments, SGDArguments, Tuning


@dataclass(kw_only=True, eq=False)
class SGD(Optimizer):
    """Stochastic gradient descent, optionally with momentum or Nesterov momentum (Sutskever et al., ICML 2013).

    The velocity sums gradients, not steps, so a change of rate acts at once. Without momentum there is no state.
    """

    momentum: float = 0.0
    nesterov: bool = False

    if TYPE_CHECKING:

        def __init__(self, **given: Unpack[SGDArguments]) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        expect("momentum", self.momentum, 0 <= self.momentum < 1, "0 <= momentum < 1")
        good = not self.nesterov or self.momentum > 0
        expect("nesterov", self.nesterov, good, "momentum, where nesterov is asked for")

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

    if TYPE_CHECKING:

        def __init__(self, **given: Unpack[AdamArguments]) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        expect("beta1", self.beta1, 0 <= self.beta1 < 1, "0 <= beta1 < 1")
        expect("beta2", self.beta2, 0 <= self.beta2 < 1, "0 <= beta2 < 1")
        expect("eps", self.eps, 1e-30 <= self.eps < math.inf, "a number from 1e-30 on")  # not 0 in float32

    @property
    def betas(self) -> tuple[float, float]:
        """`beta1` and `beta2`, as in PyTorch."""
        return self.beta1, self.beta2

    @betas.setter
    def betas(self, pair: tuple[float, float]) -> None:
        made = replace(self, beta1=pair[0], beta2=pair[1])  # both are checked before one is set
        self.beta1, self.beta2 = made.beta1, made.beta2

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

    if TYPE_CHECKING:

        def __init__(self, **given: Unpack[AdamArguments]) -> None: ...


@dataclass(kw_only=True, eq=False)
class LAMB(Adam):
    """LAMB optimizer: Adam's step, scaled to the norm of each tensor's weights (You et al., ICLR 2020, algorithm 2).

    With u = m^ / (sqrt(v^) + eps) + decay w, w -= rate |w| / |u| u. Where |w| or |u| is zero the factor is 1, so that a
    tensor can leave zero. Norms are over whole tensors.
    """

    device_rows: ClassVar[int] = 1
    eps: float = 1e-6
    decay: float = 0.01

    if TYPE_CHECKING:

        def __init__(self, **given: Unpack[AdamArguments]) -> None: ...

    def _update(self, pieces, step, scale, rates, gather):
        if gather is None:
            raise ValueError("gather: LAMB needs the block sums of all ranks, found None")
        weights, directions = [np.zeros(0)], [np.zeros(0)]
        for piece in pieces:
            use, m, v = kernels(piece.weights), piece.state["m"], piece.state["v"]
            spare = self._workspace(piece.weights)
            weights.append(block_squares(piece.weights))
            runs = self._runs(piece)
            scalars = [self._scalars(step, scale, rates[tuning.number], tuning) for tuning, _ in runs]
            for part, some, trains in self._parts(piece, scalars):
                if not trains:
                    directions.append(np.zeros((part.stop - part.start) // BLOCK))
                    continue
                use.lamb_moments(piece.gradient[part], m[part], v[part], spare, some)
                directions.append(block_squares(use.lamb_direction(piece.weights[part], m[part], v[part], spare, some)))
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

    def _portion(self, piece, part, spare, scalars):
        kernels(piece.weights).lamb(piece.weights[part], piece.state["m"][part], piece.state["v"][part], spare, scalars)


def _trust(place: ParamSpan, of_weights: np.ndarray, of_directions: np.ndarray) -> float:
    """LAMB's trust ratio |w| / |u| of a tensor (1 if either is 0), from sums of squares per block of all ranks."""
    blocks = slice(place.span.start // BLOCK, place.span.stop // BLOCK)
    weights, direction = (math.sqrt(total(sums[blocks])) for sums in (of_weights, of_directions))
    return weights / direction if weights and direction else 1.0


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "lamb": LAMB}
"""By name in checkpoints and on command lines."""
