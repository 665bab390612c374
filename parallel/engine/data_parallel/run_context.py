"""Objects that the parts of a training engine share: partition, communicator, allocator, profiler."""

from dataclasses import dataclass

import numpy as np

from collectives import Communicator
from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.nn.flat_params import FlatParams
from parallel.runtime.profiler import Profiler
from parallel.runtime.vector_memory import VectorAllocator


@dataclass(frozen=True)
class RunContext:
    """Partition, communicator, memory allocator and profiler, passed to all parts of a training engine."""

    plan: PartitionSpec
    comm: Communicator
    memory: VectorAllocator
    recorder: Profiler

    @property
    def flat(self) -> FlatParams:
        return self.plan.flat

    @property
    def storage(self) -> np.dtype:
        """Dtype of weights and activations."""
        return self.plan.precision.storage

    @property
    def wide(self) -> np.dtype:
        """Dtype of gradients, master weights and moments."""
        return self.plan.precision.wide
