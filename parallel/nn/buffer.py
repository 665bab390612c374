"""Buffers: arrays of operators that steps change and no optimizer trains, as running means or biases of routers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quant.types import Array


class StateBuffer:
    """Array on the host that belongs to an operator's state: equal on all ranks, and part of checkpoints.

    Operators have buffers in attributes, as parameters. A forward pass in training leaves the values as they are, and
    writes those that it arrives at into `PassMode.buffers`. `end_step` takes them over.

    Attributes
    ----------
    name : str
        Set by `name_all`: path from the model, such as ``"1.norm.running_mean"``.
    values : array
    """

    name: str = ""

    def __init__(self, values: Any):
        self.values = np.array(values, order="C")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def end_step(self, arrived: Sequence[Array], counts: Mapping[str, Sequence[int]]) -> None:
        """Take the mean of the values that a step's passes arrived at, in the order of micro-batches.

        So the result depends on the micro-batches, and not on the layout. With one pass it is that of the pass.
        `counts` are sums over the step of `PassMode.records`, by operator and word.
        """
        if not arrived:
            return
        if len(arrived) > 1:
            mean = sum(np.asarray(one, np.float64) for one in arrived) / len(arrived)
            arrived = [mean if self.values.dtype.kind == "f" else np.rint(mean)]
        self.values[...] = arrived[0]

    def load(self, values: Any) -> None:
        """Set the values. ValueError for another shape."""
        found = np.asarray(values)
        if found.shape != self.values.shape:
            raise ValueError(f"{self.name}: expected an array of shape {self.values.shape}, found {found.shape}")
        self.values[...] = found


class SelectionBias(StateBuffer):
    """Bias per expert, added to scores where experts are chosen, but not in their weights (DeepSeek-V3, 2412.19437).

    After every step the bias of an expert with less than the mean number of choices rises by `rate`, and that of one
    with more falls. Numbers of choices are integers, summed over all ranks: every layout has the same biases.

    Attributes
    ----------
    values : array of float32, of shape (experts,)
    """

    def __init__(self, experts: int, rate: float):
        super().__init__(np.zeros(experts, np.float32))
        self.rate = rate

    def end_step(self, arrived: Sequence[Array], counts: Mapping[str, Sequence[int]]) -> None:
        """Apply the numbers of choices of each expert in a step, over all ranks, as the router has recorded them."""
        chosen = counts.get(f"{self.name.rpartition('.')[0]} chosen")
        if chosen is not None:
            self.update(chosen)

    def update(self, chosen: Sequence[int] | np.ndarray) -> None:
        """Apply the numbers of choices of each expert."""
        counts = np.asarray(chosen, np.int64)
        self.values += np.float32(self.rate) * np.sign(counts.sum() - counts * len(counts)).astype(np.float32)
