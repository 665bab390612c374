"""Sums per block of the logical parameter vector, from those of the vectors of the ranks of a tensor-parallel axis.

A rank holds some shards of the tensors that are cut, and the others whole. In the logical vector, that of a rank with
all shards, every shard and every other tensor occurs once, so that norms count each element once and add in one order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from parallel.nn.flat_params import BLOCK, FlatParams


class HeldTensor(NamedTuple):
    """Tensor, or part of one, of a parameter vector.

    Attributes
    ----------
    name : str
        Of the logical parameter.
    label : str
        `Parameter.label`.
    length : int
        Number of elements, with padding.
    """

    name: str
    label: str
    length: int


class LogicalBlocks:
    """Order of the blocks of the logical vector.

    Parameters
    ----------
    axis : MeshAxis
        Ranks with different shards.
    whole : sequence of HeldTensor
        Every parameter of the logical vector, in order.
    held : sequence of sequences of HeldTensor
        The same, of each rank's vector.

    Attributes
    ----------
    whole
    """

    def __init__(self, axis: Any, whole: Sequence[HeldTensor], held: Sequence[Sequence[HeldTensor]]):
        self._axis = axis
        starts, at = {}, 0
        for tensor in whole:
            starts[tensor] = at
            at += tensor.length // BLOCK
        self.whole, self._size = whole, at
        ranges = [[np.arange(starts[one], starts[one] + one.length // BLOCK) for one in some] for some in held]
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


def tensors_of(flat: FlatParams) -> list[HeldTensor]:
    """Tensors and parts of tensors of a vector, in order."""
    return [HeldTensor(one.name, one.label, span.size) for one, span in flat.places]
