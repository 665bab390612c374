"""Division of a vector among ranks, and layout of its encoded parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import index
from typing import Any, NamedTuple

from mpi4py import MPI

from collectives.schedule.chunks import even
from quant.types import Array

ALIGNED = 8
"""Encoded parts start at multiples of this many bytes, so that scales are aligned."""


class VectorPartition(NamedTuple):
    """Partition of a vector among ranks: lengths and starts in elements, sizes and places (offsets) in encoded bytes.

    >>> VectorPartition.even(1000, 3, 256, lambda count: count // 4)
    VectorPartition(lengths=(512, 256, 232), starts=(0, 512, 768), sizes=(128, 64, 58), places=(0, 128, 192))
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], nbytes: Callable[[int], int]) -> VectorPartition:
        """Partition into parts of these lengths in elements. `nbytes` maps a length to its encoded bytes."""
        sizes = [nbytes(length) for length in lengths]
        room = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        starts, places = (tuple(accumulate(each[:-1], initial=0)) for each in (lengths, room))
        return cls(tuple(lengths), starts, tuple(sizes), places)

    @classmethod
    def even(cls, count: int, ranks: int, block: int, nbytes: Callable[[int], int]) -> VectorPartition:
        """Partition of `count` elements in `ranks` parts, as equal as possible, cut only at multiples of `block`."""
        ends = [min(end * block, count) for end in accumulate(even(-(-count // block), ranks))]
        return cls.of([end - start for start, end in zip([0, *ends], ends)], nbytes)

    @property
    def elements(self) -> int:
        return self.starts[-1] + self.lengths[-1]

    @property
    def nbytes(self) -> int:
        return self.places[-1] + self.sizes[-1]

    def of_vector(self, vector: Array, rank: int) -> Array:
        """View of a rank's elements of the vector."""
        return vector[self.starts[rank] : self.starts[rank] + self.lengths[rank]]

    def of_wire(self, wire: Array, rank: int) -> Array:
        """View of a rank's bytes of the encoded vector."""
        return wire[self.places[rank] : self.places[rank] + self.sizes[rank]]

    def message(self, wire: Array) -> list[Any]:
        """Buffer argument [wire, sizes, places, MPI.BYTE] of all parts, for mpi4py's v-collectives."""
        return [wire, list(self.sizes), list(self.places), MPI.BYTE]


def checked(name: str, lengths: Sequence[int], ranks: int) -> Sequence[int]:
    """Lengths of the ranks' parts as int. ValueError unless there is one for each rank, none negative.

    TypeError for numbers that are no integers. NumPy's narrow integers would wrap around in sums.
    """
    if len(lengths) != ranks or min(lengths) < 0:
        raise ValueError(f"{name}: expected the elements of {ranks} ranks' parts, found {list(lengths)}")
    return [index(length) for length in lengths]
