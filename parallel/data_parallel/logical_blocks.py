"""Sums per block of the logical parameter vector, from those of the vectors of the ranks of a tensor-parallel axis.

A rank holds some shards of the tensors that are cut, and the others whole. In the logical vector, that of a rank with
all shards, every shard and every other tensor occurs once, so that norms count each element once and add in one order.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallel.nn.flat_params import BLOCK, FlatParams


class LogicalBlocks:
    """Order of the blocks of the logical vector.

    Parameters
    ----------
    axis : MeshAxis
        Ranks with different shards.
    whole : sequence of (str, int)
        Name and length of every parameter of the logical vector, with padding, in order.
    held : sequence of sequences of (str, int)
        The same, of each rank's vector.

    Attributes
    ----------
    whole
    """

    def __init__(self, axis: Any, whole: Sequence[tuple[str, int]], held: Sequence[Sequence[tuple[str, int]]]):
        self._axis = axis
        starts, at = {}, 0
        for name, length in whole:
            starts[name] = at
            at += length // BLOCK
        self.whole, self._size = whole, at
        ranges = [[np.arange(starts[name], starts[name] + length // BLOCK) for name, length in one] for one in held]
        self._numbers = [np.concatenate([np.zeros(0, np.int64), *one]) for one in ranges]

    def gather(self, sums: np.ndarray) -> np.ndarray:
        """Sums of all logical blocks, float64, from those of this rank's vector in order. Collective along the axis."""
        counts = [len(numbers) for numbers in self._numbers]
        gathered, whole = np.empty(sum(counts)), np.zeros(self._size)
        if self._axis.size == 1:
            gathered = sums
        else:
            self._axis.comm.Allgatherv(np.ascontiguousarray(sums), [gathered, counts])
        whole[np.concatenate(self._numbers)] = gathered
        return whole


def lengths_of(flat: FlatParams) -> list[tuple[str, int]]:
    """Name and length, with padding, of every parameter of a vector."""
    return [(place.parameter.name, place.span.size) for place in flat.places]
