"""Push-sum: replicas with weights, passed on in shares in any communication pattern without changing the total.

A rank holds a vector x and a weight w. Operators use the estimate z = x / w. A share of x is passed on together with
the same share of w. So the sum of all x changes by optimizer steps only, the sum of all w remains the number of ranks,
and every z is a weighted mean of replicas. (Kempe, Dobra, Gehrke, "Gossip-based Computation of Aggregate Information",
FOCS 2003. With gradients: Nedic and Olshevsky, "Stochastic Gradient-Push for Strongly Convex Functions on Time-Varying
Directed Graphs", TAC 2016.)
"""

import numpy as np

from quant.types import Array

COMPARED = 1 << 16
"""Elements that are compared at a time, in temporary arrays."""


class PushSumMass:
    """Push-sum state of a rank: vector x, weight w, and the model's weights z = x / w. The optimizer updates z."""

    def __init__(self, z: Array, x: Array):
        self.z, self.x = z, x
        self.begin()

    def begin(self) -> None:
        """Reset the weight to 1, and x to z."""
        self.x[...] = self.z
        self.w = 1.0

    def take_changes(self) -> None:
        """Set x to w z where z was written since `update_estimate`. The other elements keep their bits."""
        if self.w == 1:
            self.x[...] = self.z
            return
        for start in range(0, len(self.z), COMPARED):
            z, x = self.z[start : start + COMPARED], self.x[start : start + COMPARED]
            changed = z != x / self.w
            x[changed] = self.w * z[changed]

    def absorb_update(self) -> None:
        """Add the optimizer's change of z to x: from w z_before to w z_before + (z - z_before)."""
        self.x *= 1 - 1 / self.w
        self.x += self.z

    def keep(self, share: float) -> None:
        """Multiply x and w by `share`, the part that this rank keeps. The caller sends the rest."""
        self.x *= share
        self.w *= share

    def add(self, x: Array, w: float) -> None:
        self.x += x
        self.w += w

    def update_estimate(self) -> None:
        np.divide(self.x, self.w, out=self.z)
