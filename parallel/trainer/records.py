"""Records of a training run for output: one per step, and test scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parallel.data.datasets import LearningTask
from parallel.runtime.step_report import Evaluation, StepReport


@dataclass(frozen=True)
class StepRecord:
    """Record of one training step: report, epoch (from 0), samples of all ranks, seconds with the wait for data."""

    report: StepReport
    epoch: int
    samples: int
    seconds: float

    def line(self) -> dict[str, Any]:
        """Values by name for a line of the metrics file. `step` counts from 1, and times differ from run to run."""
        report = self.report
        noted = {"terms": report.terms, "counts": report.counts, "traffic": report.traffic}
        return {name: value for name, value in noted.items() if value} | {
            "step": report.step + 1,
            "epoch": self.epoch,
            "loss": report.loss,
            "rate": report.rate,
            "norm": report.norm,
            "skipped": report.skipped,
            "samples": self.samples,
            "seconds": self.seconds,
            "communication": report.communication,
        }


@dataclass(frozen=True)
class EvalScore:
    """Test score: mean loss, accuracy (None for regression), and bits per byte (None unless the data are text)."""

    loss: float
    accuracy: float | None
    bits_per_byte: float | None

    @classmethod
    def of(cls, found: Evaluation, task: LearningTask) -> EvalScore:
        return cls(found.loss, found.measure, found.loss / math.log(2) if task.kind == "bytes" else None)

    def line(self) -> dict[str, Any]:
        """Values by name for a line of the metrics file, without those that are None."""
        fields = {"test_loss": self.loss, "test_accuracy": self.accuracy, "bits_per_byte": self.bits_per_byte}
        return {name: value for name, value in fields.items() if value is not None}


def combine_evaluations(found: Sequence[Evaluation]) -> Evaluation:
    """Combine evaluations of parts of a data set into one: means weighted by the number of targets.

    >>> combine_evaluations([Evaluation(1.0, 0.5, 2), Evaluation(4.0, 1.0, 1)])
    Evaluation(loss=2.0, measure=0.6666666666666666, count=3)
    """
    some = [one for one in found if one.count]
    if len(some) <= 1:  # unchanged: a product and a quotient would round
        return (some or found)[0]
    count = sum(one.count for one in some)
    loss = math.fsum(one.loss * one.count for one in some) / count
    measured = [one.measure * one.count for one in some if one.measure is not None]
    return Evaluation(loss, math.fsum(measured) / count if measured else None, count)
