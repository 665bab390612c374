"""Push-sum: weighted replicas whose shares may be passed on in any pattern without changing the total.

A rank holds a vector x and a weight w; operators use the estimate z = x / w. A share of x is passed on together with
the same share of w. So the sum of all x changes by optimizer steps only, the sum of all w remains the number of ranks,
and every z is a weighted mean of replicas. (Kempe, Dobra, Gehrke, "Gossip-based Computation of Aggregate Information",
FOCS 2003; with gradients: Nedic and Olshevsky, "Stochastic Gradient-Push for Strongly Convex Functions on Time-Varying
Directed Graphs", TAC 2016.)
"""

from __future__ import annotations

import numpy as np

from quant.types import Array


class PushSumMass:
    """Mass of a rank: x, w and the estimate z, which operators use and the optimizer changes."""

    def __init__(self, z: Array, x: Array):
        self.z, self.x = z, x
        self.begin()

    def begin(self) -> None:
        """Reset to unit weight: x is z."""
        self.x[...] = self.z
        self.w = 1.0

    def absorb_update(self) -> None:
        """Apply the optimizer's change of z to x: from w z_before to w z_before + (z - z_before)."""
        self.x *= 1 - 1 / self.w
        self.x += self.z

    def keep(self, share: float) -> None:
        """Keep a share; the caller passes on the rest."""
        self.x *= share
        self.w *= share

    def add(self, x: Array, w: float) -> None:
        self.x += x
        self.w += w

    def update_estimate(self) -> None:
        np.divide(self.x, self.w, out=self.z)
