"""The least and the largest element: of all that was seen, or as an average that forgets."""

from __future__ import annotations

from typing import Any

import numpy as np

from quant import kernels
from quant.scaling import scales as scaling
from quant.spec.granularity import Granularity, PerChannel, PerTensor, blocking, to_lines
from quant.kernels import array_namespace
from quant.layout import layout
from quant.spec.quant_spec import QuantSpec

Array = Any

TENSOR = PerTensor()


class Ranges:
    """What all observers have in common: from a range to scale and zero point."""

    granularity: Granularity = TENSOR

    def begin(self, batch: int) -> None:
        """What is seen from now on is of this batch, by its number among those of all ranks: for whom order matters."""

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """(least, largest) that codes should cover: float32, one of each per tensor or channel."""
        raise NotImplementedError

    def parameters(self, spec: QuantSpec) -> dict[str, np.ndarray]:
        """The arguments `scales` and `zeros` for `quantize`.

        Raises
        ------
        ValueError
            If nothing was seen, or the spec has another granularity or no scales of its own kind.

        Examples
        --------
        >>> from quant import INT8, quantize
        >>> seen = MinMax()
        >>> seen.observe(np.array([-1.0, 2.0], np.float32))
        >>> quantize(np.array([1.0, 2.0, 5.0], np.float32), INT8, **seen.parameters(INT8)).dequantize()
        array([1.007874, 2.      , 2.      ], dtype=float32)
        """
        if spec.granularity != self.granularity:
            raise ValueError(f"ranges of {self.granularity} were seen, and {spec.granularity} is asked for")
        if spec.code == "kmeans" or spec.q_range == "peak" or spec.scales.parent is not None:
            raise ValueError(f"a range alone does not make scales for {spec}")
        low, high = (np.atleast_1d(bound).astype(np.float32)[:, None] for bound in self.range())
        if spec.symmetric:
            size = np.maximum(abs(low), abs(high)) if spec.signed else np.maximum(high, np.float32(0))
            return {"scales": _positive(scaling.symmetric_scale(spec, size))}
        scale, bottom = scaling.affine(spec, low, high)
        above = layout(spec, (len(low), 1)).above
        kept = scaling.store(_positive(scale), spec, above).scales
        return {"scales": kept, "zeros": scaling.zero_point(spec, kept, bottom)}


def _positive(scale: np.ndarray) -> np.ndarray:
    """Scales for what was 0 throughout: any will do."""
    return np.where(scale == 0, np.float32(1), scale)


class MinMax(Ranges):
    """The least and the largest element of all that was seen.

    Parameters
    ----------
    granularity : PerTensor or PerChannel
        Channels must be equally many in every batch.
    """

    def __init__(self, granularity: Granularity = TENSOR):
        if not isinstance(granularity, PerTensor | PerChannel):
            raise ValueError(f"activations are observed per tensor or per channel, not {granularity}")
        self.granularity = granularity
        self.low: np.ndarray | None = None
        self.high: np.ndarray | None = None

    def observe(self, x: Array) -> None:
        """See a batch.

        Raises
        ------
        ValueError
            For NaN and infinity, and another number of channels than before.
        """
        low, high = batch_range(x, self.granularity)
        self._join(low, high)

    def _join(self, low: np.ndarray, high: np.ndarray) -> None:
        if self.low is None or self.high is None:
            self.low, self.high = low, high
            return
        if low.shape != self.low.shape:
            raise ValueError(f"{len(low)} channels, where there were {len(self.low)} before")
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)

    def merge(self, other: MinMax) -> MinMax:
        """A new observer that has seen what both have."""
        made = MinMax(self.granularity)
        for one in (self, other):
            if one.low is not None and one.high is not None:
                made._join(one.low, one.high)
        return made

    def allreduce(self, comm: Any) -> MinMax:
        """A new observer, the same on all ranks, that has seen what all of them have; `comm` is used as mpi4py's."""
        seen = 0 if self.low is None else len(self.low)
        counts = everywhere(comm, np.array([seen], np.int64))[:, 0]
        channels = int(counts.max())
        if any(counts[counts > 0] != channels):
            raise ValueError(f"the ranks have seen different numbers of channels: {counts.tolist()}")
        made = MinMax(self.granularity)
        if channels:
            mine = np.full((2, channels), np.inf, np.float32)
            if self.low is not None and self.high is not None:
                mine[0], mine[1] = self.low, -self.high
            least = everywhere(comm, mine.reshape(-1)).min(axis=0).reshape(2, channels)
            made._join(least[0], -least[1])
        return made

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """(least, largest)."""
        if self.low is None or self.high is None:
            raise ValueError("nothing was seen yet")
        return self.low, self.high


class Ema(Ranges):
    """The average of the batches' ranges, in which later ones count for more: new = a seen + (1 - a) old.

    Either every rank sees its part of each batch, and the n-th batch's range is that of the n-th batches of all ranks
    together; or `begin` tells before each batch which of all it is, and ranks need not see them all.
    That is why the ranges of all batches are kept, 8 bytes each, and averaged when asked for.

    Parameters
    ----------
    a : float
        Above 0, up to 1.
    """

    def __init__(self, a: float = 0.01):
        if not 0 < a <= 1:
            raise ValueError(f"a is above 0 and at most 1, not {a}")
        self.a = a
        self.batches = _unseen(0)
        self._batch: int | None = None

    def begin(self, batch: int) -> None:
        """What is seen from now on is of this batch, by its number among those of all ranks, from 0."""
        self._batch = batch

    def observe(self, x: Array) -> None:
        """See a batch, the next one, or more of the one that was begun.

        Raises
        ------
        ValueError
            For NaN and infinity.
        """
        low, high = batch_range(x, PerTensor())
        number = len(self.batches) if self._batch is None else self._batch
        seen = _unseen(number + 1)
        seen[number] = low[0], high[0]
        self.batches = self._of([self.batches, seen]).batches

    def merge(self, other: Ema) -> Ema:
        """A new observer whose n-th batch is the n-th of both together."""
        if other.a != self.a:
            raise ValueError(f"averages with a = {self.a} and a = {other.a} have nothing in common")
        return self._of([self.batches, other.batches])

    def allreduce(self, comm: Any) -> Ema:
        """A new observer, the same on all ranks, whose n-th batch is the n-th of all ranks together."""
        most = int(everywhere(comm, np.array([len(self.batches)], np.int64)).max())
        if not most:
            return self._of([self.batches])
        padded = _unseen(most)
        padded[: len(self.batches)] = self.batches
        return self._of(list(everywhere(comm, padded.reshape(-1)).reshape(-1, most, 2)))

    def _of(self, parts: list[np.ndarray]) -> Ema:
        made = Ema(self.a)
        most = max(map(len, parts))
        made.batches = _unseen(most)
        for part in parts:
            into = made.batches[: len(part)]
            into[:, 0] = np.minimum(into[:, 0], part[:, 0])
            into[:, 1] = np.maximum(into[:, 1], part[:, 1])
        return made

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """(least, largest), averaged in float64 from the first batch on."""
        batches = self.batches[self.batches[:, 0] <= self.batches[:, 1]]
        if not len(batches):
            raise ValueError("nothing was seen yet")
        old = batches[0].astype(np.float64)
        for seen in batches[1:]:
            old = self.a * seen + (1 - self.a) * old
        return old[:1].astype(np.float32), old[1:].astype(np.float32)


def _unseen(batches: int) -> np.ndarray:
    """(least, largest) of batches of which nothing was seen."""
    return np.tile(np.array([np.inf, -np.inf], np.float32), (batches, 1))


def batch_range(x: Array, granularity: Granularity) -> tuple[np.ndarray, np.ndarray]:
    """(least, largest) of a batch, of each channel: float32 on the host.

    Raises
    ------
    ValueError
        Without elements, and for NaN and infinity.
    """
    blocks = blocking(granularity, tuple(x.shape))
    if not blocks.elements:
        raise ValueError("a batch without elements has no range")
    xp = array_namespace(x)
    lines = xp.ascontiguousarray(to_lines(x.astype(np.float32, copy=False), granularity))
    low, high = kernels.minmax(lines, blocks.size)
    low, high = (bound.reshape(-1) if xp is np else bound.reshape(-1).get() for bound in (low, high))
    if not (np.isfinite(low) & np.isfinite(high)).all():
        raise ValueError("a batch holds NaN or infinity, which have no place in a range")
    return low, high


def everywhere(comm: Any, mine: np.ndarray) -> np.ndarray:
    """A vector of every rank, as rows: shape (ranks, length)."""
    all_of_them = np.empty((comm.Get_size(), len(mine)), mine.dtype)
    comm.Allgather(mine, all_of_them)
    return all_of_them
