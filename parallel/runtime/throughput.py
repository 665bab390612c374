"""Training throughput: samples per second, share of communication, model FLOPs utilisation."""

from dataclasses import dataclass

import numpy as np
from mpi4py import MPI


@dataclass(frozen=True)
class Throughput:
    """Samples per second, share of time in communication, and model FLOPs utilisation (None if no peak is known)."""

    samples_per_s: float
    communication_share: float
    mfu: float | None


class ThroughputMeter:
    """Meter of training throughput; `add` takes a step's samples (of all ranks), seconds and communication seconds.

    The overall throughput leaves out the first step of a process, which allocates and compiles, if there are others.
    `peak` is the FLOPs per second of all ranks.
    """

    def __init__(self, flops_per_sample: float, peak: float | None = None):
        self._flops, self._peak = flops_per_sample, peak
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

    def overall(self, comm: MPI.Intracomm) -> Throughput:
        """Throughput of all steps but the first, with the share of communication over all ranks. Collective."""
        total = self._total if self._total[1] or self._first is None else self._first
        samples, seconds, communication = total.tolist()
        return self._throughput(samples, seconds, _ratio(comm.allreduce(communication), comm.allreduce(seconds)))

    def _throughput(self, samples: float, seconds: float, share: float) -> Throughput:
        rate = _ratio(samples, seconds)
        return Throughput(rate, share, rate * self._flops / self._peak if self._peak else None)


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
