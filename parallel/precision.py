"""Which types of numbers a training uses: a table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from parallel.nn.kernels.storage import BFLOAT16, FLOAT16, FLOAT32, FLOAT64


class Precision(NamedTuple):
    """A recipe.

    Attributes
    ----------
    storage : dtype
        Of weights as operators see them, and of activations.
    wide : dtype
        Of gradients, moments, and the weights that are updated.
    scaled : bool
        Whether the loss is scaled, since gradients of activations would underflow.
    """

    storage: np.dtype
    wide: np.dtype
    scaled: bool = False

    @property
    def mixed(self) -> bool:
        """Whether the optimiser has master weights of its own."""
        return self.storage != self.wide


PRECISIONS = {
    "fp32": Precision(FLOAT32, FLOAT32),
    "bf16": Precision(BFLOAT16, FLOAT32),
    "fp16": Precision(FLOAT16, FLOAT32, scaled=True),
    "fp64": Precision(FLOAT64, FLOAT64),
}
"""(Micikevicius et al., "Mixed Precision Training", ICLR 2018.)"""
