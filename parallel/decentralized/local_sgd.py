"""Local SGD: every replica goes its own way for tau steps, then all become their mean.

(Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; McMahan et al., AISTATS 2017.)
"""

from __future__ import annotations

from parallel.data_parallel.run_context import Context
from parallel.nn.operator import Array
from parallel.replicas.style import Seen, Style

TAU = 8


class Local(Style):
    """One allreduce of the weights in `tau` steps: 2 (p-1)/p n / tau bytes a step and rank.

    Parameters
    ----------
    context, vector
        As of `Style`.
    tau : int
        1 averages after every step.
    """

    def __init__(self, context: Context, vector: Array, tau: int = TAU):
        super().__init__(context, vector)
        self._tau = tau

    def reach(self, step: int) -> int:
        return self._tau - 1 - step % self._tau

    def mix(self, step: int, seen: Seen) -> Seen:
        return seen if self.reach(step) else self.meet(seen)
