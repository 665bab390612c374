"""Mixed precision: table of dtypes for weights, gradients and optimizer state, and their bytes per parameter.

>>> PRECISIONS["bf16"].bytes_per_parameter(states=2)
{'weights': 2, 'gradients': 4, 'master': 4, 'optimizer': 8}
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from parallel.optim.loss_scaling import LossScale


class Precision(NamedTuple):
    """Mixed-precision recipe: storage dtype, wide dtype, loss scaling (Micikevicius et al., ICLR 2018).

    `storage` is the dtype of weights and activations, `wide` that of summed gradients, optimizer state and master
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
