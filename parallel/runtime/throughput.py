"""Training throughput: samples per second, share of communication, model FLOPs utilisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mpi4py import MPI


class MeteredStep(Protocol):
    """Interface of a measured step, such as `parallel.trainer.trainer.StepRecord`."""

    @property
    def samples(self) -> int:
        """Samples of all ranks."""

    @property
    def seconds(self) -> float:
        """Seconds of the step on this rank."""

    @property
    def communication(self) -> float:
        """Seconds spent in communication."""


@dataclass(frozen=True)
class Throughput:
    """Samples per second, share of time in communication, and model FLOPs over the peak (None if unknown)."""

    samples_per_s: float
    communication_share: float
    mfu: float | None


class ThroughputMeter:
    """Adds up steps; the first one of a process is left out when there are others, since it makes and compiles things.

    Parameters
    ----------
    flops_per_sample : float
    peak : float, optional
        FLOPs a second of all ranks.
    """

    def __init__(self, flops_per_sample: float, peak: float | None = None):
        self._flops, self._peak = flops_per_sample, peak
        self._first: tuple[float, float, float] | None = None
        self._total = (0.0, 0.0, 0.0)
        self._window = (0.0, 0.0, 0.0)

    def add(self, step: MeteredStep) -> None:
        """Note a step."""
        seen = (float(step.samples), step.seconds, step.communication)
        self._window = _sum(self._window, seen)
        if self._first is None:
            self._first = seen
        else:
            self._total = _sum(self._total, seen)

    @property
    def window_seconds(self) -> float:
        """Seconds of the steps since the last `recent`."""
        return self._window[1]

    def recent(self) -> Throughput:
        """Throughput of this rank since the last call."""
        window, self._window = self._window, (0.0, 0.0, 0.0)
        return self._speed(window, window[1:])

    def overall(self, comm: MPI.Intracomm) -> Throughput:
        """Throughput of all steps, with the share of communication over all ranks. Collective."""
        total = self._total if self._total[1] else self._first or self._total
        return self._speed(total, (comm.allreduce(total[1]), comm.allreduce(total[2])))

    def _speed(self, steps: tuple[float, float, float], times: tuple[float, ...]) -> Throughput:
        rate = steps[0] / steps[1] if steps[1] else 0.0
        share = times[1] / times[0] if times[0] else 0.0
        return Throughput(rate, share, rate * self._flops / self._peak if self._peak else None)


def _sum(a: tuple[float, float, float], b: tuple[float, float, float]) -> tuple[float, float, float]:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])
