"""Local SGD: replicas train independently for tau steps, then average.

(Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; McMahan et al., AISTATS 2017.)
"""

from __future__ import annotations

from parallel.data_parallel.run_context import RunContext
from parallel.decentralized.averaging_style import AveragingStyle, ReplicaSums
from quant.types import Array

TAU = 8


class LocalSGD(AveragingStyle):
    """Local SGD: one allreduce of the weights in `tau` steps, 2 (p-1)/p n / tau bytes per step and rank."""

    def __init__(self, context: RunContext, vector: Array, tau: int):
        super().__init__(context, vector)
        self._tau = tau

    def reach(self, step: int) -> int:
        return self._tau - 1 - step % self._tau

    def mix(self, step: int, sums: ReplicaSums) -> ReplicaSums:
        return sums if self.reach(step) else self.average_all(sums)
