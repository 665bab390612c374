"""What the papers' formulas say of schedules, to hold the simulator against."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from parallel.pipeline.schedule.numeric import Number
from parallel.pipeline.schedule.activation_memory import peaks
from parallel.pipeline.schedule.simulator import Timeline


class Formulas(NamedTuple):
    """A schedule's costs.

    In the formulas p is the stages, m the micro-batches of a step, n the steps, v the parts that a micro-batch meets on
    a stage, s the number of the stage, g the length of a group of micro-batches (`schedules.interleaved`); F, B and W
    are the times of a stage for a micro-batch, and messages take none.

    Attributes
    ----------
    idle : str
        Of every stage, from the first computation of all stages to the last.
    keeps : str
        Micro-batches that stage s keeps at once; with several chunks, each in one of them.
    holds : str
        When these are exact.
    overlapping : bool
        Whether `idle` is only what is lost per step where steps follow one another and nobody waits for all.
    """

    idle: str
    keeps: str
    holds: str = "True"
    overlapping: bool = False


FORMULAS: dict[str, Formulas] = {
    "naive": Formulas("(p-1)*m*(F+B+W)", "1"),
    "gpipe": Formulas("(p-1)*(F+B+W)", "m"),
    "1f1b": Formulas("(p-1)*(F+B+W)", "min(m, p-s)"),
    "interleaved": Formulas("(p-1)*(F+B+W)/v", "min(v*m, 2*(p-1-s) + (v-1)*g + 1)", "m >= p and v > 1"),
    "pipedream": Formulas("(p-1)*(F+B+W)", "min(n*m, p-s)"),
    "pipedream-2bw": Formulas("(p-1)*(F+B+W)", "min(n*m, p-s)"),
    "zb-h1": Formulas("(p-1)*(F+B-W)", "p", "m >= p and W <= min(F, B)"),
    "zb-h2": Formulas("(p-1)*(F+B-2*W)", "2*p-1", "m >= 2*p-1 and W <= min(F, B)", overlapping=True),
    "zb-v": Formulas("0", "2*p", "m >= 2*p-1 and F == B == W", overlapping=True),
    "dualpipe": Formulas("(p/2-1)*(F+B-W)", "p+1", "p % 2 == m % 2 == 0 and m >= 2*p and W <= B <= F"),
    "dualpipe-v": Formulas("(p-1)*(F+B-W)/2", "2*p+1", "m >= 2*p and W <= B <= F"),
}
"""By the name of the schedule; a schedule of your own need have none."""


def evaluate(formula: str, **letters: Number) -> Number:
    """The value of a formula, exactly; `letters` as in `Formulas`.

    >>> evaluate("(p/2-1)*(F+B-W)", p=5, F=1, B=1, W=1)
    Fraction(3, 2)
    """
    exact = {letter: Fraction(value) for letter, value in letters.items()}
    return eval(formula, {"__builtins__": {}, "min": min, **exact})  # the formulas are the constants above


def deviations(
    name: str, timeline: Timeline, microbatches: int, forward: Number, backward: Number, weights: Number
) -> list[str]:
    """Where the simulator and the formulas differ; nothing where these do not hold, or there are none.

    Parameters
    ----------
    name : str
        Of the schedule.
    timeline : Timeline
        Simulated without time for messages.
    microbatches : int
        Of a step.
    forward, backward, weights : number
        Of a stage for a micro-batch, in all parts that it meets there.
    """
    if name not in FORMULAS:
        return []
    says, plan = FORMULAS[name], timeline.plan
    p, m, v = plan.stages, microbatches, Fraction(plan.placement.parts, plan.stages)
    group = -(-m // max(1, m // p))
    letters: dict[str, Number] = {"p": p, "m": m, "n": plan.microbatches // m, "v": v, "g": group}
    letters |= {"F": forward, "B": backward, "W": weights}
    if not evaluate(says.holds, **letters):
        return []
    found = []
    idle = timeline.period - timeline.busy[0] if says.overlapping else timeline.idle[0]
    if idle != evaluate(says.idle, **letters):
        found.append(f"{name}: idle for {idle}, where {says.idle} is {evaluate(says.idle, **letters)}")
    for stage, kept in enumerate(peaks(plan)):
        expected = evaluate(says.keeps, s=stage, **letters)
        if kept != expected:
            found.append(f"{name}: stage {stage} keeps {kept} micro-batches, where {says.keeps} is {expected}")
    return found
