"""Draw what the stages of a pipeline do when: as text, as a picture, or as a trace for ui.perfetto.dev.

    python scripts/draw_pipeline.py --schedule 1f1b --stages 4 --microbatches 8
    python scripts/draw_pipeline.py --schedule zb-h1 --stages 4 --microbatches 8 -o pipeline.png
    python scripts/draw_pipeline.py --schedule 1f1b --schedule zb-h1 --schedule dualpipe -o several.png
    python scripts/draw_pipeline.py --schedule zb-h1 --stages 4 --microbatches 8 --measured out/trace.json -o both.png

The schedule is played by the simulator, which proves it first; a name that ends in .csv is a table of your own, with a
line for every stage. Several are drawn below each other. What is measured comes from the trace of a run. Runs in one
process; pictures need matplotlib (the extra "plot").
"""

from __future__ import annotations

import argparse
import shutil
import sys
from fractions import Fraction
from pathlib import Path

from benchlib.timelines import entries, measured, picture, simulated, summary
from parallel.pipeline.schedule import timeline as draw
from parallel.pipeline.schedule.actions import from_csv, to_csv
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.stage_placement import PLACEMENTS
from parallel.pipeline.schedule.pipeline_plan import Plan, build
from parallel.pipeline.schedule.schedules import SCHEDULES, Entry, tabled
from parallel.pipeline.schedule.simulator import Timeline, Times, simulate

PICTURES = (".png", ".svg", ".pdf")
MILLISECONDS = 1000
"""Units of time in a second: what a unit becomes in a trace."""

FORMATS = (*PICTURES, ".json", ".csv")


def output(text: str) -> Path:
    """A file name that says what is to be written."""
    path = Path(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text}: expected a name that ends in {', '.join(FORMATS)}")
    return path


def duration(text: str) -> Fraction:
    """An exact number from 0 on: 2, 0.5 or 1/3."""
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        number = Fraction(-1)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 on, such as 2, 0.5 or 1/3")
    return number


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    known = f"{', '.join(SCHEDULES)}; or a file of your own, NAME.csv; may be repeated"
    add("--schedule", required=True, action="append", metavar="NAME", help=known)
    add("--stages", type=int, metavar="P", help="ranks along the pipeline (default 4, or the lines of the .csv)")
    add("--microbatches", type=int, metavar="M", help="of a step (default 8, or those in the .csv)")
    add("--virtual", type=int, metavar="V", help="parts of the model on a stage, for interleaved (default 2)")
    add("--steps", type=int, default=1, metavar="N", help="steps without a flush, for pipedream (default 1)")
    add("--placement", choices=list(PLACEMENTS), default="loop", help="which parts of the model are where in a .csv")
    add("--forward", type=duration, default=Fraction(1), metavar="T", help="time of a stage's forward (default 1)")
    add("--backward", type=duration, default=Fraction(1), metavar="T", help="of its input gradient (default 1)")
    add("--weights", type=duration, default=Fraction(1), metavar="T", help="of its weights' gradients (default 1)")
    add("--message", type=duration, default=Fraction(0), metavar="T", help="of a message (default 0)")
    add("--measured", type=Path, metavar="FILE", help="a run's trace, from which a step is drawn below")
    add("--step", type=int, metavar="K", help="which of the trace's steps (default the last)")
    add("-o", "--output", type=output, metavar="FILE", help="a picture (.png, .svg, .pdf), a trace (.json), or a .csv")
    return result


def planned(name: str, arguments: argparse.Namespace) -> Plan:
    """The plan that the options ask for, of one schedule.

    Raises
    ------
    ValueError
        If they ask for none.
    """
    defaults = 4, 8
    if name.endswith(".csv"):
        try:
            actions = from_csv(Path(name).read_text())
        except OSError as error:
            raise ValueError(f"--schedule: {error}") from None
        placement = PLACEMENTS[arguments.placement]
        chunks = 1 + max((action.chunk for line in actions for action in line), default=0)
        where = (lambda stages: placement(stages, chunks)) if arguments.placement == "loop" else placement
        SCHEDULES[name] = Entry(tabled(actions), where)
        defaults = len(actions), 1 + max((action.microbatch for line in actions for action in line), default=0)
    stages = defaults[0] if arguments.stages is None else arguments.stages
    microbatches = defaults[1] if arguments.microbatches is None else arguments.microbatches
    return build(name, stages, microbatches, virtual=arguments.virtual, steps=arguments.steps)


def played(name: str, arguments: argparse.Namespace) -> Timeline:
    """One schedule, played with the times that the options say.

    Raises
    ------
    ValueError
        If there is no such plan, or it cannot be carried out.
    """
    plan = planned(name, arguments)
    parts = Fraction(plan.placement.parts, plan.stages)  # that a micro-batch meets on a stage
    F, B, W = (each / parts for each in (arguments.forward, arguments.backward, arguments.weights))
    return simulate(lower(plan), Times(F, B, W, arguments.message))


def titled(timeline: Timeline) -> str:
    """What was played."""
    plan = timeline.plan
    return f"{plan.name}, {plan.stages} stages, {plan.microbatches} micro-batches"


def main() -> int:
    command = parser()
    arguments = command.parse_args()
    path: Path | None = arguments.output
    if path is not None and path.suffix not in PICTURES and len(arguments.schedule) > 1:
        command.error(f"--schedule: expected one for a {path.suffix}, found {len(arguments.schedule)}")
    try:
        timelines = [played(name, arguments) for name in arguments.schedule]
        bands = [simulated(timeline, f"{titled(timeline)}: {summary(timeline)}") for timeline in timelines]
        if arguments.measured is not None:
            bands.append(measured(arguments.measured, arguments.step))
    except ValueError as error:
        command.error(str(error))
    if path is None:
        width = shutil.get_terminal_size((0, 0)).columns
        for timeline in timelines:
            print(f"{titled(timeline)}\n{summary(timeline)}\n\n{draw.table(timeline, width)}\n")
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        path.write_text(to_csv(planned(arguments.schedule[0], arguments).actions))
    elif path.suffix == ".json":
        from benchlib import traces

        traces.write(path, entries(timelines[0], second=MILLISECONDS), schedule=titled(timelines[0]))
    else:
        try:
            picture(path, bands)
        except ImportError as error:
            command.error(f"pictures need matplotlib ({error}): pip install 'chorus-mpi[plot]'")
    print(f"{path} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
