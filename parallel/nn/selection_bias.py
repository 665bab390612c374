"""Biases of experts in the choice of a router, which balance the load without a loss term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallel.nn.array_checks import is_single


class SelectionBias:
    """Bias per expert, added to scores where experts are chosen, but not in their weights (DeepSeek-V3, 2412.19437).

    After every step the bias of an expert with less than the mean number of choices rises by `rate`, and that of one
    with more falls. Numbers of choices are integers, summed over all ranks: every layout has the same biases.

    Attributes
    ----------
    values : array of float32, of shape (experts,)
    """

    def __init__(self, experts: int, rate: float):
        self.rate, self.values = rate, np.zeros(experts, np.float32)

    def update(self, chosen: Sequence[int] | np.ndarray) -> None:
        """Apply the numbers of choices of each expert in a step, over all ranks."""
        counts = np.asarray(chosen, np.int64)
        self.values = self.values + np.float32(self.rate) * np.sign(counts.sum() - counts * len(counts))
        self.values = self.values.astype(np.float32)

    def state(self) -> list[float]:
        return [float(value) for value in self.values]

    def load(self, state: Any) -> None:
        """Restore `state`; ValueError unless it has a finite number for every expert."""
        numbers = isinstance(state, list) and all(map(is_single, state))
        if not numbers or len(state) != len(self.values):
            raise ValueError(f"selection bias: expected {len(self.values)} numbers, found {state!r}")
        self.values = np.array(state, np.float32)
