"""Mixed precision: dtypes of weights, gradients and optimizer state, their bytes per parameter. Dynamic loss scaling.

Losses multiply by the scale, `parallel.engine.data_parallel.sharded_optimizer` divides.


>>> PRECISIONS["bf16"].bytes_per_parameter(states=2)
{'weights': 2, 'gradients': 4, 'master': 4, 'optimizer': 8}
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from parallel.nn.array_checks import whole_number
from parallel.runtime.validation import expect_mapping


@dataclass
class LossScale:
    """Dynamic loss scale for float16: grows after many finite gradients, shrinks after one that is not finite.

    Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2. All ranks pass the same `finite`, and so
    have the same scale. ValueError for settings out of range.

    >>> scale = LossScale(value=8.0, interval=2)
    >>> for finite in (True, True, False, False):
    ...     scale.update(finite)
    >>> scale.value, scale.skipped
    (4.0, 2)

    Parameters
    ----------
    value : float
        Initial factor. Powers of two are exact.
    growth, backoff : float
        Multiply the factor after `interval` finite gradients in a row, and after one that is not finite.
    interval : int
    floor, ceiling : float
        Bounds of the factor.
    patience : int
        Steps in a row that may be skipped with the factor at its floor, before that is an error.
    good, skipped, stuck : int
        State of a restored run: finite gradients in a row since the last change, skipped steps in a row, and skipped
        steps at the floor.
    """

    value: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 1.0
    ceiling: float = 2.0**32
    patience: int = 20
    good: int = 0
    skipped: int = 0
    stuck: int = 0

    def __post_init__(self) -> None:
        for name in ("interval", "patience", "good", "skipped", "stuck"):
            whole_number(name, getattr(self, name), name == "interval")
        for name, good, expected in (
            ("floor", 0 < self.floor < math.inf, "a positive number"),
            ("ceiling", self.floor <= self.ceiling < math.inf, f"a number from floor = {self.floor} on"),
            ("value", self.floor <= self.value <= self.ceiling, f"{self.floor} to {self.ceiling}"),
            ("growth", 1 <= self.growth < math.inf, "a number from 1 on"),
            ("backoff", 0 < self.backoff <= 1, "0 < backoff <= 1"),
            ("interval", self.interval >= 1, "at least 1"),
            ("patience", self.patience >= 0, "a number from 0 on"),
            ("good", 0 <= self.good < self.interval, f"0 <= good < interval = {self.interval}"),
            ("skipped", self.skipped >= 0, "a number from 0 on"),
            ("stuck", 0 <= self.stuck <= self.skipped, f"0 <= stuck <= skipped = {self.skipped}"),
        ):
            if not good:
                raise ValueError(f"{name}: expected {expected}, found {getattr(self, name)}")

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step. `finite`: the gradient was finite and applied, otherwise the step was skipped.

        FloatingPointError after more than `patience` skipped steps in a row at the floor.
        """
        if not finite:
            self.stuck += self.value == self.floor
            self.value = max(self.value * self.backoff, self.floor)
            self.good, self.skipped = 0, self.skipped + 1
            if self.stuck > self.patience:
                raise FloatingPointError(
                    f"the gradient is not finite in {self.skipped} steps in a row, in the last {self.stuck} of them "
                    f"with the loss scale at its floor {self.floor}"
                )
            return
        self.good, self.skipped, self.stuck = self.good + 1, 0, 0
        if self.good == self.interval:
            self.value, self.good = min(self.value * self.growth, self.ceiling), 0

    def state(self) -> dict[str, Any]:
        """All fields by name, to save in a checkpoint."""
        return asdict(self)

    def load(self, state: dict[str, Any]) -> None:
        """Restore fields that `state` returned. ValueError, with nothing changed, if they are invalid.

        Nothing changes either if only one of the two scales is fixed at 1, which precisions without loss scaling do: a
        checkpoint of such a training may be loaded in fp16, and one of fp16 in another precision.
        """
        kinds = {field.name: (int,) if field.type == "int" else (int, float) for field in fields(self)}
        if set(expect_mapping(state, "loss scale")) != set(kinds):
            raise ValueError(f"state: expected {', '.join(sorted(kinds))}, found {', '.join(sorted(state))}")
        for name, value in state.items():
            if not isinstance(value, kinds[name]) or isinstance(value, bool):  # bool is a subclass of int
                raise ValueError(f"{name}: expected a number, found {value!r}")
        found = LossScale(**state)
        if (found.ceiling > found.floor) == (self.ceiling > self.floor):
            self.__dict__.update(asdict(found))


class Precision(NamedTuple):
    """Mixed-precision recipe: storage dtype, wide dtype, loss scaling (Micikevicius et al., ICLR 2018).

    `storage` is the dtype of weights and activations, `wide` the dtype of summed gradients, optimizer state and master
    weights (if `storage` is narrower). `scaled` means dynamic loss scaling: small gradients underflow in float16, not
    in bfloat16.
    """

    storage: np.dtype
    wide: np.dtype
    scaled: bool

    @property
    def master(self) -> bool:
        """True if the optimizer keeps separate master weights, of dtype `wide`."""
        return self.storage != self.wide

    def loss_scale(self) -> LossScale:
        """Create a loss scale: dynamic if `scaled`, else fixed at 1."""
        return LossScale() if self.scaled else LossScale(1.0, growth=1.0, backoff=1.0, ceiling=1.0)

    def bytes_per_parameter(self, states: int) -> dict[str, int]:
        """Bytes per parameter by kind (weights, gradients...), unsharded, if the optimizer has `states` state vectors.

        18 in all for Adam with half storage, as gradients are kept in float32 only (16 with half gradients, 20 with
        both).
        """
        return {
            "weights": self.storage.itemsize,
            "gradients": self.wide.itemsize,
            "master": self.wide.itemsize * self.master,
            "optimizer": self.wide.itemsize * states,
        }


PRECISIONS = {
    "fp64": Precision(np.dtype(np.float64), np.dtype(np.float64), False),
    "fp32": Precision(np.dtype(np.float32), np.dtype(np.float32), False),
    "bf16": Precision(np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), False),
    "fp16": Precision(np.dtype(np.float16), np.dtype(np.float32), True),
}
