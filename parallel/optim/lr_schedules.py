"""Learning-rate schedules: functions of the number of updates made so far that return the next update's rate.

>>> warm = LRSchedule("warm_up_cosine", rate=1.0, warm_up=2, steps=6)
>>> [round(warm(step), 3) for step in range(7)]
[0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
>>> LRSchedule(**warm.describe()) == warm
True
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parallel.runtime.validation import real_number


def constant(step: int, *, rate: float) -> float:
    return rate


def linear_warm_up(step: int, *, rate: float, warm_up: int) -> float:
    """Learning rate at `step`: `warm_up` equal increments up to `rate`, then constant (Goyal et al. 2017)."""
    return rate * min(1.0, (step + 1) / warm_up) if warm_up else rate


def cosine(step: int, *, rate: float, steps: int, floor: float = 0.0) -> float:
    """Learning rate at `step`: half a cosine from `rate` at step 0 to `floor` at `steps`, then constant.

    Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5."""
    return floor + 0.5 * (rate - floor) * (1.0 + math.cos(math.pi * min(step, steps) / steps)) if steps else floor


def warm_up_cosine(step: int, *, rate: float, warm_up: int, steps: int, floor: float = 0.0) -> float:
    """Learning rate at `step`: `linear_warm_up`, then `cosine` over the remaining steps."""
    if step < warm_up:
        return linear_warm_up(step, rate=rate, warm_up=warm_up)
    return cosine(step - warm_up, rate=rate, steps=steps - warm_up, floor=floor)


SCHEDULES: dict[str, Callable[..., float]] = {
    function.__name__: function for function in (constant, linear_warm_up, cosine, warm_up_cosine)
}


def _real(name: str, value: Any) -> float:
    try:
        return real_number(value)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


@dataclass(init=False)
class LRSchedule:
    """Learning-rate schedule, callable with a step: a function of `SCHEDULES` by name, and its settings.

    Parameters
    ----------
    name : str
    **settings
        Those of the function: ``rate`` and ``floor`` are rates, ``warm_up`` and ``steps`` numbers of updates.
        ValueError if they are missing, unknown or out of range.
    """

    name: str
    settings: dict[str, float]

    def __init__(self, name: str, **settings: float):
        if name not in SCHEDULES:
            raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, found {name!r}")
        try:
            inspect.signature(SCHEDULES[name]).bind(0, **settings)
        except TypeError as error:
            raise ValueError(f"schedule {name}: {error}") from None
        for key, value in settings.items():
            whole, value = key in ("warm_up", "steps"), _real(key, value)
            # `not 0 <= value` also refuses NaN
            if not 0 <= value < math.inf or (whole and int(value) != value):
                raise ValueError(f"{key}: expected {'a whole' if whole else 'a'} number from 0 on, found {value}")
        if settings.get("warm_up", 0) > settings.get("steps", math.inf):
            raise ValueError(f"warm_up: expected at most steps = {settings['steps']}, found {settings['warm_up']}")
        self.name, self.settings = name, settings

    def __call__(self, step: int) -> float:
        return SCHEDULES[self.name](step, **self.settings)

    def __hash__(self) -> int:
        return hash((self.name, *sorted(self.settings.items())))

    def describe(self) -> dict[str, Any]:
        """Name and settings, as keyword arguments that make an equal `LRSchedule`. For a checkpoint."""
        return {"name": self.name, **self.settings}


Rate = float | Callable[[int], float]
"""Learning rate, or a function of the number of earlier updates."""


def rate_at(rate: Rate, step: int) -> float:
    """Learning rate (`rate`, or ``rate(step)``) after `step` updates. ValueError if negative or not finite."""
    if step < 0:
        raise ValueError(f"step: expected the number of updates made before, found {step}")
    found = rate(step) if callable(rate) else rate
    try:
        value = real_number(found)
    except TypeError as error:
        raise TypeError(f"rate at step {step}: {error}") from None
    if not 0 <= value < math.inf:
        raise ValueError(f"rate: expected a number from 0 on at step {step}, found {value}")
    return value


def describe(rate: Rate) -> Any:
    """Description of a rate for a checkpoint: the number, that of its `describe`, or another function's name."""
    if hasattr(rate, "describe"):
        return rate.describe()
    return getattr(rate, "__qualname__", type(rate).__qualname__) if callable(rate) else rate
