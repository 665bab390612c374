"""Results of a training step and of an evaluation."""

from dataclasses import dataclass, field


def in_units(count: float) -> float:
    """A number of targets, as int if it is whole."""
    return int(count) if count == int(count) else count


@dataclass(frozen=True)
class StepReport:
    """Result of a training step: loss, gradient norm, rates, times. On synchronous engines only times differ by rank.

    Parameter servers and decentralised replicas report loss, count and norm of fewer ranks: see their `step`.

    Attributes
    ----------
    step : index of the step, from 0
    loss : mean over `count` targets of all ranks. NaN without targets
    count : sum of the loss' counts, an int if it is whole
    norm : norm of the mean loss's gradient before clipping. Inf after an overflow, None without targets
    skipped : True if nothing was updated: no targets, or an overflow (it lowers the loss scale)
    scale, rate : loss scale and learning rate of this step
    stop : True if this step is the last one, as some rank requested to stop
    seconds, communication : time of the step, and this rank's part of it in communication, waiting included
    terms : loss terms of operators beside `loss`, such as ``"2.1.inner.1 balance"``: sums divided by `count`
    counts : what operators counted in the step, such as choices by expert
    traffic : what operators exchanged, summed over ranks, such as ``"2.1.inner.1.experts copies"`` of tokens. In
        "seconds" the mean over ranks
    """

    step: int
    loss: float
    count: float
    norm: float | None
    skipped: bool
    scale: float
    rate: float
    stop: bool
    seconds: float
    communication: float
    terms: dict[str, float] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)
    traffic: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation: mean loss and metric (or None) over the `count` targets of all ranks. NaN if none."""

    loss: float
    measure: float | None
    count: float
