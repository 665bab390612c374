"""A vector divided among ranks, and where the bytes of its parts lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.schedule.chunks import even

ALIGNED = 8
"""Bytes of a part begin at a multiple of this, so that scales can be read and written where they lie."""


class VectorPartition(NamedTuple):
    """A vector divided among ranks, and its encoded parts, one after another.

    >>> VectorPartition.even(1000, 3, 256, lambda count: count // 4)
    VectorPartition(lengths=(512, 256, 232), starts=(0, 512, 768), sizes=(128, 64, 58), places=(0, 128, 192))
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], nbytes: Callable[[int], int]) -> VectorPartition:
        """Partition with the given numbers of elements."""
        sizes = [nbytes(length) for length in lengths]
        room = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        starts, places = (tuple(accumulate(each[:-1], initial=0)) for each in (lengths, room))
        return cls(tuple(lengths), starts, tuple(sizes), places)

    @classmethod
    def even(cls, count: int, ranks: int, block: int, nbytes: Callable[[int], int]) -> VectorPartition:
        """As equal as whole blocks can be."""
        ends = [min(end * block, count) for end in accumulate(even(-(-count // block), ranks))]
        return cls.of([end - start for start, end in zip([0, *ends], ends)], nbytes)

    @property
    def elements(self) -> int:
        """Total number of elements."""
        return self.starts[-1] + self.lengths[-1]

    @property
    def nbytes(self) -> int:
        """Total number of encoded bytes."""
        return self.places[-1] + self.sizes[-1]

    def of_vector(self, vector: np.ndarray, rank: int) -> np.ndarray:
        """A rank's part of the elements."""
        return vector[self.starts[rank] : self.starts[rank] + self.lengths[rank]]

    def of_wire(self, wire: np.ndarray, rank: int) -> np.ndarray:
        """A rank's part of the bytes."""
        return wire[self.places[rank] : self.places[rank] + self.sizes[rank]]

    def message(self, wire: np.ndarray) -> list[Any]:
        """All parts of the bytes, as collectives take them."""
        return [wire, list(self.sizes), list(self.places), MPI.BYTE]


def checked(name: str, lengths: Sequence[int], ranks: int) -> Sequence[int]:
    """The lengths of parts, one for each rank; raises ValueError if they are not."""
    if len(lengths) != ranks or any(length < 0 for length in lengths):
        raise ValueError(f"{name}: expected the elements of {ranks} ranks' parts, found {list(lengths)}")
    return lengths
