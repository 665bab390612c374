"""Push-sum: weighted replicas whose shares may be passed on in any pattern without changing the total.

A rank holds a vector x and a weight w; operators use the estimate z = x / w. A share of x is passed on together with
the same share of w. So the sum of all x changes by optimizer steps only, the sum of all w remains the number of ranks,
and every z is a weighted mean of replicas. (Kempe, Dobra, Gehrke, "Gossip-based Computation of Aggregate Information",
FOCS 2003; with gradients: Nedic and Olshevsky, "Stochastic Gradient-Push for Strongly Convex Functions on Time-Varying
Directed Graphs", TAC 2016.)

>>> import numpy as np
>>> masses = [PushSumMass(np.array([float(rank)]), np.zeros(1)) for rank in range(2)]
>>> masses[0].z += 1.0  # a step of the optimizer
>>> for mass in masses:
...     mass.absorb_update()
>>> share = masses[0].x * 0.25, masses[0].w * 0.25
>>> masses[0].keep(0.75)
>>> masses[1].add(*share)
>>> for mass in masses:
...     mass.update_estimate()
>>> [(mass.w, float(mass.x[0])) for mass in masses], float(masses[1].z[0])
([(0.75, 0.75), (1.25, 1.25)], 1.0)
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
        """Add received mass."""
        self.x += x
        self.w += w

    def update_estimate(self) -> None:
        """Recompute z from x and w."""
        np.divide(self.x, self.w, out=self.z)
