"""Search table: costs and losses of every layer's options."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Choice = tuple[int, ...]
"""Option index of every layer."""


@dataclass(frozen=True)
class SearchTable:
    """Costs and losses by layer and option; both add up over layers. ValueError for an invalid table.

    Parameters
    ----------
    costs : array of numbers, shape (layers, options)
        Bytes or seconds, for example: not negative; infinite where a layer does not have an option.
    losses : array of finite numbers, shape (layers, options)
        Expected increase of the loss; may be negative.

    >>> table = SearchTable([[1, 2], [10, 20]], [[5.0, 1.0], [4.0, 0.0]])
    >>> table.cost((1, 0)), table.loss((1, 0))
    (12.0, 5.0)
    """

    costs: np.ndarray
    losses: np.ndarray

    def __post_init__(self) -> None:
        for name in ("costs", "losses"):
            object.__setattr__(self, name, np.array(getattr(self, name), np.float64))
        if self.costs.ndim != 2 or self.costs.shape != self.losses.shape or not self.costs.size:
            shapes = f"{self.costs.shape} and {self.losses.shape}"
            raise ValueError(f"costs and losses: expected shape (layers, options), found {shapes}")
        if not (self.costs >= 0).all():
            raise ValueError("costs are not negative")
        if not np.isfinite(self.costs).any(axis=1).all():
            raise ValueError("every layer has an option of finite cost")
        if not np.isfinite(self.losses).all():
            raise ValueError("losses are finite")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.costs)

    def cost(self, choice: Choice) -> float:
        """Total cost of a choice."""
        return float(self.costs[np.arange(self.layers), choice].sum())

    def loss(self, choice: Choice) -> float:
        """Total loss of a choice."""
        return float(self.losses[np.arange(self.layers), choice].sum())

    def cheapest(self, budget: float) -> Choice:
        """Cheapest choice, ties by loss. ValueError if it exceeds the budget."""
        order = np.lexsort((self.losses, self.costs), axis=1)
        choice = tuple(int(option) for option in order[:, 0])
        if not self.cost(choice) <= budget:
            raise ValueError(f"budget: the cheapest options cost {self.cost(choice):g} together, found {budget:g}")
        return choice
