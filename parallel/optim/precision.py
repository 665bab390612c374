"""Mixed precision: types of storage and computation, and their bytes.

>>> PRECISIONS["bf16"].bytes_per_parameter(states=2)
{'weights': 2, 'gradients': 4, 'master': 4, 'optimizer': 8}
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from parallel.optim.loss_scaling import LossScale


class Precision(NamedTuple):
    """A recipe (Micikevicius et al., "Mixed Precision Training", ICLR 2018).

    Attributes
    ----------
    storage : dtype
        Of weights and activations, as operators see them.
    wide : dtype
        Of gradients as they are added up, the optimiser's state and, where `storage` is narrower, its master weights.
    scaled : bool
        Whether the loss is scaled dynamically: float16 has no room for small gradients; bfloat16 has float32's range.
    """

    storage: np.dtype
    wide: np.dtype
    scaled: bool

    @property
    def master(self) -> bool:
        """True if the optimizer keeps master weights of its own."""
        return self.storage != self.wide

    def loss_scale(self) -> LossScale:
        """A new loss scale: dynamic, or fixed at 1."""
        return LossScale() if self.scaled else LossScale.fixed()

    def bytes_per_parameter(self, states: int) -> dict[str, int]:
        """Bytes per parameter by kind, for an optimizer with so many state vectors, unsharded.

        18 in all for Adam with half storage: gradients are kept in float32 only. Recipes that keep half gradients have
        16, and those that keep both 20.
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
