"""What all parts of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collectives import Communicator
from parallel.nn.flat_params import Flat
from parallel.runtime.vector_memory import Memory
from parallel.data_parallel.partition_spec import Plan
from parallel.runtime.profiler import Recorder


@dataclass(frozen=True)
class Context:
    """The plan, the ranks, the memory, the clock."""

    plan: Plan
    comm: Communicator
    memory: Memory
    recorder: Recorder

    @property
    def flat(self) -> Flat:
        """The vector of parameters."""
        return self.plan.flat

    @property
    def storage(self) -> np.dtype:
        """The type of weights as operators see them, and of activations."""
        return self.plan.precision.storage

    @property
    def wide(self) -> np.dtype:
        """The type of gradients, master weights and moments."""
        return self.plan.precision.wide
