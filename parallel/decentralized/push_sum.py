"""Push-sum: replicas as masses that may be cut up and handed on, so that whatever the way, their sum stays what it was.

A rank holds a vector x and a weight w; the estimate that operators work with is z = x / w. Whoever hands on a share of
x hands on the same share of w. So the sum of all x changes only where an optimiser moves a replica, that of all w stays
the number of ranks, and each z is a mean of replicas, whatever the shares. (Kempe, Dobra, Gehrke, "Gossip-based
Computation of Aggregate Information", FOCS 2003; with gradients: Nedic and Olshevsky, "Stochastic Gradient-Push for
Strongly Convex Functions on Time-Varying Directed Graphs", TAC 2016.)

>>> import numpy as np
>>> masses = [Mass(np.array([float(rank)]), np.zeros(1)) for rank in range(2)]
>>> masses[0].z += 1.0  # a step of the optimiser
>>> for mass in masses:
...     mass.moved()
>>> share = masses[0].x * 0.25, masses[0].w * 0.25
>>> masses[0].keep(0.75)
>>> masses[1].add(*share)
>>> for mass in masses:
...     mass.settle()
>>> [(mass.w, float(mass.x[0])) for mass in masses], float(masses[1].z[0])
([(0.75, 0.75), (1.25, 1.25)], 1.0)
"""

from __future__ import annotations

import numpy as np

from parallel.nn.operator import Array


class Mass:
    """A rank's x, w and z.

    Parameters
    ----------
    z : array
        The estimate: what operators see, and what the optimiser moves.
    x : array like z
        Memory.

    Attributes
    ----------
    w : float
    """

    def __init__(self, z: Array, x: Array):
        self.z, self.x = z, x
        self.begin()

    def begin(self) -> None:
        """As much mass as there is on every other rank: x is z."""
        self.x[...] = self.z
        self.w = 1.0

    def moved(self) -> None:
        """The optimiser has moved z: x moves as far, from w z_before to w z_before + (z - z_before)."""
        self.x *= 1 - 1 / self.w
        self.x += self.z

    def keep(self, share: float) -> None:
        """The rest goes to others."""
        self.x *= share
        self.w *= share

    def add(self, x: Array, w: float) -> None:
        """Some mass has come."""
        self.x += x
        self.w += w

    def settle(self) -> None:
        """See what z is now."""
        np.divide(self.x, self.w, out=self.z)
