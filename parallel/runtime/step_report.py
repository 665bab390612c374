"""Reports of a step and of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """Report of a step, equal on all ranks except for the times.

    Attributes
    ----------
    step : int
        Index of the step, from 0.
    loss : float
        Mean over `count` targets of all ranks; NaN without targets.
    norm : float or None
        Norm of the mean loss's gradient before clipping; inf after an overflow, None without targets.
    skipped : bool
        True if nothing was updated: no targets, or an overflow, which lowers the loss scale.
    scale, rate : float
        Loss scale and learning rate of this step.
    stop : bool
        True if some rank requested to stop.
    seconds, communication : float
        Time of the step, and this rank's part of it in communication, waiting included.
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


@dataclass(frozen=True)
class Evaluation:
    """Means over all targets of all ranks; NaN if there are none. `measure` is None if nothing was measured."""

    loss: float
    measure: float | None
    count: int
