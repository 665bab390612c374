"""Reports of a step and of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """Report of a step, equal on all ranks except for the times.

    Attributes
    ----------
    step : int
        The number of the step, from 0.
    loss : float
        Mean over `count` targets; NaN if there were none.
    count : int
        Targets of all ranks.
    norm : float or None
        Of the mean loss's gradient, before clipping; inf if it has overflowed, None if there were no targets.
    skipped : bool
        Nothing was updated: there were no targets, or the gradient has overflowed and the loss scale is smaller now.
    scale : float
        The loss scale that was used.
    rate : float
        The learning rate.
    stop : bool
        Some rank wants to stop.
    seconds, communication : float
        Of the step; of these, what this rank has spent in communication, waiting included.
    early : int
        Exchanges of gradients that were started on this rank before its last backward had ended.
    """

    step: int
    loss: float
    count: int
    norm: float | None
    skipped: bool
    scale: float
    rate: float
    stop: bool
    seconds: float
    communication: float
    early: int


@dataclass(frozen=True)
class Evaluation:
    """Means over all targets of all ranks; NaN if there are none. `measure` is None if nothing was measured."""

    loss: float
    measure: float | None
    count: int
