"""Prove every pipeline schedule for every number of stages and micro-batches, and compare it with its formulas.

    chorus prove pipelines --stages 16 --microbatches 64

A proof simulates all stages: no deadlock, every micro-batch passes forward and back through all parts of the model
once, messages keep their order, and weights are used only after their update. Idle time and memory must equal the
formulas exactly wherever these hold. Runs in --jobs processes of one machine. Exit status 1 at the first fault.
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from itertools import product

from collectives.cli.launcher import ProgramParser, at_least, followed
from collectives.units import format_time
from parallel.pipeline.schedule.activation_memory import peaks
from parallel.pipeline.schedule.formulas import FORMULAS, deviations
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, build
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.pipeline.schedule.simulator import ActionTimes, PlanError, simulate

VIRTUAL, STEPS = (1, 2, 3, 4), (1, 3)  # values of parameters that a schedule leaves open

TIMES = ((1, 1, 1), (3, 2, 1))
"""Times of F, B and W. A deadlock does not depend on them, so every plan runs with one of these only."""


def fault(plan: PipelinePlan, microbatches: int) -> str | None:
    """Simulate a plan. Returns the first error or deviation from the schedule's formulas as text, None if correct."""
    parts = Fraction(plan.placement.parts, plan.stages)
    F, B, W = TIMES[microbatches // 2 % len(TIMES)]
    try:
        timeline = simulate(plan, ActionTimes(F / parts, B / parts, W / parts))
    except PlanError as error:
        return str(error)
    return next(iter(deviations(plan.name, timeline, microbatches, F, B, W)), None)


def first_fault(name: str, stages: int, most: int) -> tuple[str | None, int]:
    """Check a schedule at 1 to `most` micro-batches: (first fault or None, number of plans proved before it)."""
    takes = SCHEDULES[name].options
    virtuals, many = VIRTUAL if "virtual" in takes else (None,), STEPS if "steps" in takes else (1,)
    for count, (microbatches, virtual, steps) in enumerate(product(range(1, most + 1), virtuals, many)):
        found = fault(lower(build(name, stages, microbatches, virtual=virtual, steps=steps)), microbatches)
        if found:
            return f"{name}, {stages=}, {microbatches=}, {virtual=}, {steps=}: {found}", count
    return None, most * len(virtuals) * len(many)


def table(stages: int, microbatches: int) -> str:
    """Table with time, idle share, memory and messages of each schedule, if F, B and W take one time unit each."""
    lines = [f"{'schedule':<15}{'takes':>8}{'idle':>9}{'keeps at most':>15}{'messages':>10}  idle by the formula"]
    for name in SCHEDULES:
        plan = lower(build(name, stages, microbatches))
        parts = Fraction(plan.placement.parts, plan.stages)
        timeline = simulate(plan, ActionTimes(*[1 / parts] * 3))
        kept = max(peaks(plan, 1 / parts))
        formula = f"{FORMULAS[name].idle}{' between steps' * FORMULAS[name].overlapping}" if name in FORMULAS else ""
        takes, idle, count = float(timeline.makespan), float(timeline.bubble), len(timeline.messages)
        lines.append(f"{name:<15}{takes:>8g}{idle:>9.1%}{float(kept):>15g}{count:>10}  {formula}".rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = ProgramParser(__doc__)
    add, count = parser.add_argument, at_least(1, int, 1 << 12)
    add("--stages", type=count, default=16, metavar="P", help="most stages (default 16)")
    add("--microbatches", type=count, default=64, metavar="M", help="most micro-batches (default 64)")
    add("--jobs", type=count, default=os.cpu_count(), metavar="N", help="processes (default: cores)")
    arguments = parser.parse_args()
    began, proved = time.perf_counter(), 0
    jobs = [(name, stages, arguments.microbatches) for stages in range(arguments.stages, 0, -1) for name in SCHEDULES]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        answers = pool.map(first_fault, *zip(*jobs))
        for _ in followed(jobs, "proving", "schedule"):
            found, plans = next(answers)
            proved += plans
            if found:
                print(found, file=sys.stderr)
                pool.shutdown(cancel_futures=True)
                return 1
    print(f"At {arguments.stages} stages and {arguments.microbatches} micro-batches, F, B and W one unit each:\n")
    print(table(arguments.stages, arguments.microbatches))
    up_to = f"up to {arguments.stages} stages and {arguments.microbatches} micro-batches"
    seconds = time.perf_counter() - began
    print(f"\nproved {proved} plans of {len(SCHEDULES)} schedules for {up_to} in {format_time(seconds)}")
    return 0
