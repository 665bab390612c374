"""What all parts of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collectives import Communicator
from parallel.flat import Flat
from parallel.memory import Memory
from parallel.nn.operator import Operator
from parallel.record import Recorder


@dataclass(frozen=True)
class Hall:
    """The ranks, the model and its vector, the memory, the types of numbers, the clock.

    Attributes
    ----------
    storage : dtype
        Of parameters as operators see them, and of activations.
    wide : dtype
        Of gradients, master weights and moments.
    reproducible : bool
        Whether gradients are added in the canonical order.
    bucket_bytes, first_bytes : int
        When a bucket is closed: of gradients, in all layouts that have buckets.
    """

    comm: Communicator
    units: tuple[Operator, ...]
    flat: Flat
    memory: Memory
    recorder: Recorder
    storage: np.dtype
    wide: np.dtype
    reproducible: bool
    bucket_bytes: int
    first_bytes: int

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.comm.Get_rank()

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.comm.Get_size()

    @property
    def longest(self) -> int:
        """Elements of the longest tensor."""
        return max((place.size for place in self.flat.places), default=0)
