"""Span of the flat parameter vector with its weights, gradient and optimizer state."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from parallel.nn.flat_params import BLOCK, ParamSpan, Span
from parallel.optim.param_groups import MissedUpdates
from quant.types import Array


class ElementRun(NamedTuple):
    """Elements `start` to `stop`, relative to a span, of one or several tensors. `place` is the first one."""

    start: int
    stop: int
    place: ParamSpan


@dataclass(eq=False)
class OptimizerSpan:
    """Span of the flat parameter vector that this rank updates, with its weights, gradient and optimizer state.

    Parameters
    ----------
    span : Span
    weights : array, shape (span.size,), float32 or float64
        The weights, or the master that half-precision weights are rounded from.
    gradient : array like weights
        Sum over samples, times the loss scale, not divided. Only read. Zero in the padding between tensors.
    state : dict of arrays like weights
        From `Optimizer.fresh`.
    places : iterable of ParamSpan
        At least all that the span touches.
    stored : array, shape (span.size,), of a half type, optional
        The weights as operators use them. Written along with the master.
    missed : MissedUpdates
        Earlier updates of the span in which a logical parameter was frozen.
    """

    span: Span
    weights: Array
    gradient: Array
    state: dict[str, Array]
    places: Iterable[ParamSpan]
    stored: Array | None = None
    missed: MissedUpdates = field(default_factory=MissedUpdates, repr=False)
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
        # only tensors in the span are updated, in the order of the vector
        shares = [(place, place.span.intersection(self.span)) for place in self.places]
        tensors = (ElementRun(share.start - start, share.stop - start, place) for place, share in shares if share.size)
        self.tensors = tuple(sorted(tensors, key=lambda run: run.start))
        self.places = tuple(run.place for run in self.tensors)
        if sum(run.stop - run.start for run in self.tensors) != self.span.size:
            raise ValueError(f"places: expected tensors that fill {start} to {stop} exactly, found {self.places}")
