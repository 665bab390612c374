"""Draw the timeline of a pipeline schedule, as text or picture, or write its table of actions.

    chorus draw pipeline --schedule 1f1b --stages 4 --microbatches 8
    chorus draw pipeline --schedule zb-h1 --stages 4 --microbatches 8 -o pipeline.png
    chorus draw pipeline --schedule 1f1b --schedule zb-h1 --schedule dualpipe -o several.png
    chorus draw pipeline --schedule zb-h1 --stages 4 --microbatches 8 --measured out/trace.json -o both.png

The simulator proves the schedule and runs it. A schedule whose name ends in .csv is a file with a line per stage.
Several are drawn below each other, and below them the last step of a measured trace (`chorus train --trace`). Runs in
one process. Pictures need matplotlib (the extra "plot").
"""

import argparse
import shutil
from fractions import Fraction
from pathlib import Path

from collectives.benchmark.reports import PICTURES
from collectives.cli.launcher import ProgramParser, at_least
from parallel.cli.reports.timelines import measured, picture, simulated, summary
from parallel.pipeline.schedule import timeline as draw
from parallel.pipeline.schedule.actions import from_csv, to_csv
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pass_pairs import paired
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, build
from parallel.pipeline.schedule.schedules import SCHEDULES, ScheduleEntry, tabled
from parallel.pipeline.schedule.simulator import ActionTimes, Timeline, simulate
from parallel.pipeline.schedule.stage_placement import PLACEMENTS

FORMATS = (*PICTURES, ".csv")


def output(text: str) -> Path:
    """Argument type of --output: file name with a supported suffix."""
    path = Path(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text}: expected a name that ends in {', '.join(FORMATS)}")
    return path


def duration(text: str) -> Fraction:
    """Argument type: non-negative exact number, such as 2, 0.5 or 1/3."""
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        number = Fraction(-1)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 on, such as 2, 0.5 or 1/3")
    return number


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__)
    add, count = result.add_argument, at_least(1, int, 1 << 14)
    known = f"{', '.join(SCHEDULES)}; or a file of your own, NAME.csv; may be repeated"
    add("--schedule", required=True, action="append", metavar="NAME", help=known)
    add("--stages", type=count, metavar="P", help="ranks along the pipeline (default 4, or the lines of the .csv)")
    add("--microbatches", type=count, metavar="M", help="of a step (default 8, or those in the .csv)")
    add("--virtual", type=count, metavar="V", help="parts of the model on a stage, for interleaved (default 2)")
    add("--steps", type=count, default=1, metavar="N", help="steps without a flush, for pipedream (default 1)")
    add("--placement", choices=list(PLACEMENTS), default="loop", help="which parts of the model are where in a .csv")
    add("--forward", type=duration, default=Fraction(1), metavar="T", help="time of a stage's forward (default 1)")
    add("--backward", type=duration, default=Fraction(1), metavar="T", help="of its input gradient (default 1)")
    add("--weights", type=duration, default=Fraction(1), metavar="T", help="of its weights' gradients (default 1)")
    add("--message", type=duration, default=Fraction(0), metavar="T", help="of a message (default 0)")
    pairs = "with the pairs of --overlap-expert-comm, of whose shorter passes this part takes no time"
    add("--overlap", type=duration, metavar="FRACTION", help=pairs)
    add("--measured", type=Path, metavar="FILE", help="a run's trace, whose last step is drawn below")
    add("-o", "--output", type=output, metavar="FILE", help=f"a file {', '.join(FORMATS)}")
    return result


def plan_of(name: str, arguments: argparse.Namespace) -> PipelinePlan:
    """Build the plan of schedule `name` (a .csv file joins `SCHEDULES`) from the options. ValueError if impossible."""
    defaults = 4, 8
    if name.lower().endswith(".csv"):
        try:
            actions = from_csv(Path(name).read_text())
        except OSError as error:
            raise ValueError(f"--schedule: {error}") from None
        placement = PLACEMENTS[arguments.placement]
        chunks = 1 + max((action.chunk for line in actions for action in line), default=0)
        # vee and opposed always have two chunks on a stage
        where = (lambda stages: placement(stages, chunks)) if arguments.placement == "loop" else placement
        SCHEDULES[name] = ScheduleEntry(tabled(actions), where)
        defaults = len(actions), 1 + max((action.microbatch for line in actions for action in line), default=0)
    stages = defaults[0] if arguments.stages is None else arguments.stages
    microbatches = defaults[1] if arguments.microbatches is None else arguments.microbatches
    return build(name, stages, microbatches, virtual=arguments.virtual, steps=arguments.steps)


def timeline_of(plan: PipelinePlan, arguments: argparse.Namespace) -> Timeline:
    """Simulate a plan with the durations among the options. ValueError if it cannot be executed."""
    plan = plan if arguments.overlap is None else paired(plan)
    parts = Fraction(plan.placement.parts, plan.stages)  # parts of the model on a stage
    F, B, W = (each / parts for each in (arguments.forward, arguments.backward, arguments.weights))
    return simulate(lower(plan), ActionTimes(F, B, W, arguments.message, min(arguments.overlap or 0, 1)))


def title_of(timeline: Timeline) -> str:
    plan = timeline.plan
    pairs = f", {len(plan.pairs)} pairs" if plan.pairs else ""
    return f"{plan.name}, {plan.stages} stages, {plan.microbatches} micro-batches{pairs}"


def main() -> int:
    command = parser()
    arguments = command.parse_args()
    path: Path | None = arguments.output
    if path is not None and path.suffix.lower() == ".csv" and len(arguments.schedule) > 1:
        command.error(f"--schedule: expected one for a .csv, found {len(arguments.schedule)}")
    try:
        plans = [plan_of(name, arguments) for name in arguments.schedule]
        timelines = [timeline_of(plan, arguments) for plan in plans]
        bands = [simulated(timeline, f"{title_of(timeline)}: {summary(timeline)}") for timeline in timelines]
        if arguments.measured is not None:
            bands.append(measured(arguments.measured))
    except ValueError as error:
        command.error(str(error))
    if path is None:
        width = shutil.get_terminal_size((0, 0)).columns
        for timeline in timelines:
            print(f"{title_of(timeline)}\n{summary(timeline)}\n\n{draw.table(timeline, width)}\n")
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".csv":
        path.write_text(to_csv(plans[0].actions))
    else:
        try:
            picture(path, bands)
        except ImportError as error:  # picture() imports matplotlib, which text does not need
            command.error(f"pictures need matplotlib ({error}): pip install 'chorus-mpi[plot]'")
    print(f"{path} written")
    return 0
