"""Allreduce of float32 vectors quantised to integers with a scale shared by all ranks, whose sums are exact."""

from numbers import Integral
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.compressed.bound_collective import BoundCollective, Motion, module_of
from quant.types import Array


class SharedScale(BoundCollective):
    """Allreduce of float32 vectors as integers: each group has one scale on all ranks, given by its largest element.

    Sums of integers are exact, so the result does not depend on their order. Each term is encoded once, the sum never.
    Messages consist of `integer`, a dtype as wide as the largest sum needs.

    Parameters
    ----------
    comm : Communicator
    count, bits, group : int
        Elements of the vectors. Bits of a term, 2 to 16. Elements that share a scale.
    like : module or array, optional
        The module ``cupy``, or one of its arrays: for vectors on a GPU.
    """

    def __init__(self, comm: Communicator, count: int, bits: int = 8, group: int = 256, like: Any = None):
        given: dict[str, object] = {"count": count, "bits": bits, "group": group}
        for name, number in given.items():
            if not isinstance(number, Integral):
                raise TypeError(f"{name}: expected a whole number, found {number!r}; SharedScale takes no codec")
        if not 2 <= bits <= 16:
            raise ValueError(f"bits: expected 2 to 16, found {bits}")
        if group < 1:
            raise ValueError(f"group: expected 1 element or more, found {group}")
        self.comm, self.count, self.group = comm, count, group
        self.largest = 2 ** (bits - 1) - 1
        wanted = self.largest * comm.Get_size()
        self.integer = next(np.dtype(kind) for kind in ("i1", "i2", "i4", "i8") if wanted <= np.iinfo(kind).max)
        self._groups = -(-count // group)
        self._peaks = comm.empty(self._groups, np.float32, like)
        self._codes = comm.empty(count, self.integer, like)
        self._xp = module_of(like)

    def allreduce(self, x: Array, out: Array, lost: Array | None = None) -> Motion:
        """Sum all ranks' x into `out`, x's encoding error in `lost` (either may be x). Yield requests to wait for."""
        xp, (whole, tail) = self._xp, divmod(self.count, self.group)
        if whole:
            abs(x[: whole * self.group].reshape(whole, self.group)).max(axis=1, out=self._peaks[:whole])
        if tail:
            self._peaks[whole] = abs(x[-tail:]).max()
        finite = xp.isfinite(self._peaks)
        self._peaks[...] = xp.where(finite, self._peaks, np.float32(np.inf))  # 0 x inf: NaN in the group on all ranks
        yield [self.comm.Iallreduce(MPI.IN_PLACE, self._peaks, MPI.MAX)]
        steps = xp.repeat(self._peaks / np.float32(self.largest), self.group)[: self.count]
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = xp.where(steps > 0, x / steps, np.float32(0))
            xp.rint(codes, out=codes)
            xp.clip(codes, -self.largest, self.largest, out=codes)  # a denormal step is itself rounded
            codes = xp.where(xp.isfinite(codes), codes, np.float32(0))
            self._codes[...] = codes
            if lost is not None:
                xp.subtract(x, codes * steps, out=lost)
        yield [self.comm.Iallreduce(MPI.IN_PLACE, self._codes, MPI.SUM)]  # the caller's error state is its own
        with np.errstate(invalid="ignore"):
            xp.multiply(self._codes, steps, out=out)
