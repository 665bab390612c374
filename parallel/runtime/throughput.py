"""Training throughput: samples per second, share of communication, utilisation of the peak FLOPs."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from mpi4py import MPI


@dataclass(frozen=True)
class Throughput:
    """Samples per second, share of time in communication, utilisation of the peak FLOPs (None if that is unknown).

    `mfu` counts the FLOPs of the model, `hfu` also those of recomputation (Chowdhery et al., "PaLM", 2022).
    """

    samples_per_s: float
    communication_share: float
    mfu: float | None
    hfu: float | None


class ThroughputMeter:
    """Meter of training throughput. `add` takes a step's samples (of all ranks), seconds and communication seconds.

    The overall throughput leaves out the first step of a process (it allocates and compiles), if there are others.
    `flops`: FLOPs of a sample, without and with recomputation. `peak` is the FLOPs per second of all ranks.
    """

    def __init__(self, flops: tuple[float, float], peak: float | None = None):
        self._flops, self._peak = flops, peak
        self._first: np.ndarray | None = None
        self._total, self._window = np.zeros(3), np.zeros(3)

    def add(self, samples: int, seconds: float, communication: float) -> None:
        row = np.array([samples, seconds, communication])
        self._window += row
        if self._first is None:
            self._first = row
        else:
            self._total += row

    @property
    def window_seconds(self) -> float:
        """Seconds of the steps since the last call of `recent`."""
        return float(self._window[1])

    def recent(self) -> Throughput:
        """Throughput since the last call of `recent`, with this rank's share of communication."""
        samples, seconds, communication = self._window.tolist()
        self._window[:] = 0
        return self._throughput(samples, seconds, _ratio(communication, seconds))

    @property
    def communication_share(self) -> float:
        """This rank's share of communication in all steps but the first."""
        total = self._total if self._total[1] or self._first is None else self._first
        return _ratio(float(total[2]), float(total[1]))

    def overall(self, comm: MPI.Intracomm) -> Throughput:
        """Throughput of all steps but the first, with the share of communication over all ranks. Collective."""
        total = self._total if self._total[1] or self._first is None else self._first
        samples, seconds, communication = total.tolist()
        return self._throughput(samples, seconds, _ratio(comm.allreduce(communication), comm.allreduce(seconds)))

    def _throughput(self, samples: float, seconds: float, share: float) -> Throughput:
        rate = _ratio(samples, seconds)
        mfu, hfu = (rate * flops / self._peak if self._peak else None for flops in self._flops)
        return Throughput(rate, share, mfu, hfu)


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


SLOW, NOTABLE = 1.5, 0.2
"""Least ratio to the others' median, and least share of its time, that a slow rank computes."""


def slow_rank(computes: Sequence[float]) -> tuple[int, float] | None:
    """Rank that the others wait for, and how many times it computes as long as their median. None if there is none.

    From each rank's share of time outside of communication.

    >>> slow_rank([0.2, 0.6, 0.3]), slow_rank([0.8, 0.9, 0.7]), slow_rank([0.01, 0.1]), slow_rank([0.9])
    ((1, 2.4), None, None, None)
    """
    slowest = max(range(len(computes)), key=computes.__getitem__)
    others = [share for rank, share in enumerate(computes) if rank != slowest]
    if not others or computes[slowest] < max(NOTABLE, SLOW * median(others)):
        return None
    return slowest, computes[slowest] / max(median(others), 1e-9)
