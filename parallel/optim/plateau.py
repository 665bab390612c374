"""Decisions by a series of scores, such as losses of a test set: lower the learning rate, or end the training.

All ranks make the same decisions if they observe the same scores, as those that `Engine.evaluate` returns.

>>> stop = EarlyStop(patience=2)
>>> [stop.observe(loss) for loss in (3.0, 2.0, 2.5, 2.1)]
[False, False, False, True]
"""

import math
from collections.abc import Mapping
from typing import Any

from parallel.optim.lr_schedules import Rate, describe, rate_at
from parallel.runtime.validation import expect_integer, expect_mapping, real_number

MODES = ("min", "max")


class _Watch:
    """Best of a series of scores, and number of those in a row that were no better.

    Parameters
    ----------
    patience : int
    mode : {"min", "max"}
        Direction in which scores are better.
    threshold : float
        Relative improvement from which a score is better. NaN never is.
    """

    def __init__(self, patience: int, mode: str = "min", threshold: float = 1e-4):
        if mode not in MODES:
            raise ValueError(f"mode: expected min or max, found {mode!r}")
        self.patience = expect_integer({"patience": patience}, "patience")
        self.mode, self.threshold = mode, real_number(threshold)
        self.best: float | None = None
        self.waited = 0

    def _note(self, score: float) -> None:
        """Take a score over if it is better, or count it."""
        value = real_number(score)
        sign = 1 if self.mode == "min" else -1
        best = sign * math.inf if self.best is None else self.best
        is_better = sign * value < sign * best * (1 - sign * self.threshold)
        if is_better:
            self.best = value
        self.waited = 0 if is_better else self.waited + 1

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as values for JSON."""
        return {"best": self.best, "waited": self.waited}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. ValueError, with nothing changed, for anything else."""
        values = expect_mapping(state, "state")
        best, waited = values.get("best"), expect_integer(values, "waited")
        if best is not None and not isinstance(best, float | int):
            raise ValueError(f"best: expected a number or None, found {best!r}")
        self.best, self.waited = best, waited


class EarlyStop(_Watch):
    """End of a training after `patience` scores in a row, at least 1, that are no better than the best one.

    Prechelt, "Early stopping - but when?", 1998.

    Parameters
    ----------
    patience : int
    mode, threshold : see `ReduceLROnPlateau`
    """

    def __init__(self, patience: int, mode: str = "min", threshold: float = 0.0):
        super().__init__(patience, mode, threshold)
        if patience < 1:
            raise ValueError(f"patience: expected 1 or more, found {patience}")

    def observe(self, score: float) -> bool:
        """Take a score into account. True to end the training."""
        self._note(score)
        return self.waited >= self.patience


class ReduceLROnPlateau(_Watch):
    """Learning rate that is multiplied by `factor` when scores do not improve, as that of PyTorch.

    Of an optimizer, as in ``AdamW(lr=ReduceLROnPlateau(0.01, patience=3))``. Call `observe` on all ranks.

    Parameters
    ----------
    rate : float or function of the number of updates
        What is multiplied, such as an `LRSchedule`.
    patience : int
        The next score after this number in a row that are no better lowers the rate.
    factor : float
        From 0 to below 1.
    mode : {"min", "max"}
        Direction in which scores are better.
    threshold : float
        Relative improvement from which a score is better.
    cooldown : int
        Scores after a reduction that do not count.
    least : float
        Lower limit of the rate.
    """

    def __init__(
        self,
        rate: Rate,
        patience: int = 10,
        factor: float = 0.1,
        *,
        mode: str = "min",
        threshold: float = 1e-4,
        cooldown: int = 0,
        least: float = 0.0,
    ):
        super().__init__(patience, mode, threshold)
        if not 0 <= factor < 1:
            raise ValueError(f"factor: expected a number from 0 to below 1, found {factor}")
        rate_at(rate, 0)
        self.rate, self.factor, self.least = rate, real_number(factor), real_number(least)
        self.cooldown = expect_integer({"cooldown": cooldown}, "cooldown")
        self.cooling = self.reductions = 0

    def __call__(self, step: int) -> float:
        rate = rate_at(self.rate, step)
        for _ in range(self.reductions):
            rate = max(rate * self.factor, min(rate, self.least))
        return rate

    def observe(self, score: float) -> bool:
        """Take a score into account. True if it lowers the rate."""
        self._note(score)
        if self.cooling:
            self.cooling, self.waited = self.cooling - 1, 0
        if self.waited <= self.patience:
            return False
        self.cooling, self.waited, self.reductions = self.cooldown, 0, self.reductions + 1
        return True

    def state(self) -> dict[str, Any]:
        return super().state() | {"cooling": self.cooling, "reductions": self.reductions}

    def load(self, state: Mapping[str, Any]) -> None:
        cooling, reductions = (expect_integer(expect_mapping(state, "state"), one) for one in ("cooling", "reductions"))
        super().load(state)
        self.cooling, self.reductions = cooling, reductions

    def describe(self) -> dict[str, Any]:
        """Name and settings, for a checkpoint."""
        names = ("patience", "factor", "mode", "threshold", "cooldown", "least")
        settings = {name: getattr(self, name) for name in names}
        return {"name": "reduce_on_plateau", "rate": describe(self.rate), **settings}
