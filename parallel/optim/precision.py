"""Mixed precision: dtypes of storage and computation, and their bytes.

>>> PRECISIONS["bf16"].bytes_per_parameter(states=2)
{'weights': 2, 'gradients': 4, 'master': 4, 'optimizer': 8}
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from parallel.optim.loss_scaling import LossScale


class Precision(NamedTuple):
    """Mixed-precision recipe (Micikevicius et al., "Mixed Precision Training", ICLR 2018).

    `storage` is the dtype of weights and activations, `wide` that of summed gradients, optimizer state and master
    weights (if `storage` is narrower). `scaled` means dynamic loss scaling: small gradients underflow in float16, not
    in bfloat16.
    """

    storage: np.dtype
    wide: np.dtype
    scaled: bool

    @property
    def master(self) -> bool:
        """True if the optimizer keeps separate master weights."""
        return self.storage != self.wide

    def loss_scale(self) -> LossScale:
        """A new loss scale: dynamic, or fixed at 1."""
        return LossScale() if self.scaled else LossScale(1.0, growth=1.0, backoff=1.0, ceiling=1.0)

    def bytes_per_parameter(self, states: int) -> dict[str, int]:
        """Bytes per parameter by kind, for an optimizer with `states` state vectors, unsharded.

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
