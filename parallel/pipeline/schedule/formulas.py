"""Closed formulas of the schedules' costs, from their papers. Tests compare the simulator with them."""

from fractions import Fraction
from typing import NamedTuple

from parallel.pipeline.schedule.activation_memory import peaks
from parallel.pipeline.schedule.simulator import Timeline
from parallel.pipeline.schedule.stage_placement import Number


class Formulas(NamedTuple):
    """Idle time of a schedule and number of micro-batches alive, as formulas of p, m, n, v, s, g, F, B and W.

    p is the number of stages, m of micro-batches in a step, n of steps, v of parts that a micro-batch passes on a
    stage, s the number of the stage, g the length of a group of micro-batches (`schedules.interleaved`); F, B and W
    are the times of a stage for a micro-batch; messages take no time.
    """

    idle: str  # idle time of every stage, from the first computation of all stages to the last
    keeps: str  # micro-batches alive at once on stage s, counted by chunk
    holds: str = "True"  # condition under which the formulas are exact
    overlapping: bool = False  # True if `idle` is the idle time per step of steps that follow without a flush


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
"""Formulas by name of the schedule. Optional for user-defined schedules."""


def evaluate(formula: str, **letters: Number) -> Number:
    """Exact value of a formula, for values of its variables `letters` (those of `Formulas`)."""
    names = {"__builtins__": {}, "min": min, **{letter: Fraction(value) for letter, value in letters.items()}}
    value: Number = eval(formula, names)  # the formulas are the constants above
    return value


def deviations(
    name: str, timeline: Timeline, microbatches: int, forward: Number, backward: Number, weights: Number
) -> list[str]:
    """Differences of a simulated timeline from the formulas of schedule `name`, as texts. Empty if these do not apply.

    The timeline has messages that take no time and steps of `microbatches`; `forward`, `backward` and `weights` are the
    times of a stage for a micro-batch, over all its parts.
    """
    if name not in FORMULAS:
        return []
    formulas, plan = FORMULAS[name], timeline.plan
    p, m, v = plan.stages, microbatches, Fraction(plan.placement.parts, plan.stages)
    group = -(-m // max(1, m // p))
    letters: dict[str, Number] = {"p": p, "m": m, "n": plan.microbatches // m, "v": v, "g": group}
    letters |= {"F": forward, "B": backward, "W": weights}
    if not evaluate(formulas.holds, **letters):
        return []
    found = []
    idle = timeline.period - timeline.busy[0] if formulas.overlapping else timeline.idle[0]
    if idle != evaluate(formulas.idle, **letters):
        found.append(f"{name}: idle for {idle}, expected {formulas.idle} = {evaluate(formulas.idle, **letters)}")
    for stage, kept in enumerate(peaks(plan)):
        expected = evaluate(formulas.keeps, s=stage, **letters)
        if kept != expected:
            found.append(f"{name}: stage {stage} keeps {kept} micro-batches, expected {formulas.keeps} = {expected}")
    return found
