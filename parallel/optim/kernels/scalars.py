"""Scalars of the formulas of optimizers: of one run of elements, and of several in one call on a device."""

from collections.abc import Sequence
from typing import NamedTuple

from parallel.nn.flat_params import BLOCK
from quant.types import Array


class Scalars(NamedTuple):
    """Scalars of a formula, in the order of `updates.h`, combined in double precision. 0 if it does not use them."""

    scale: float = 0.0  # of the gradient
    rate: float = 0.0
    decay: float = 0.0  # times the weights is added to the gradient, or to LAMB's direction
    beta: float = 0.0  # momentum
    gain1: float = 0.0  # 1 - beta1, or the share of the weights in a moving average
    gain2: float = 0.0  # 1 - beta2
    eps: float = 0.0
    root: float = 0.0  # corrects the root of the second moment: 1 / sqrt(1 - beta2^t)
    heal: float = 0.0  # corrects the first moment: 1 / (1 - beta1^t)
    pace: float = 0.0  # heal times rate
    keep: float = 0.0  # factor of the weights in AdamW, or of a moving average


class RunScalars(NamedTuple):
    """Scalars of several runs of elements: one `Scalars` per run, or None where it is not updated.

    `numbers`, an int32 array on the device, has the number of the run of each block of `BLOCK` elements.
    """

    runs: Sequence[Scalars | None]
    numbers: Array

    def of_blocks(self, part: slice) -> "RunScalars":
        """Scalars of the elements `part` (whole blocks)."""
        return self._replace(numbers=self.numbers[part.start // BLOCK : part.stop // BLOCK])
