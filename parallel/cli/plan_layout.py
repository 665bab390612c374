"""Find the fastest layout of a training on the available ranks, and run it: DDP, ZeRO, tp, cp, ep, pipelines, ps.

chorus plan --search -n 4 --data pydoc --model gpt:small --batch 16
chorus plan --run -n 4 --data pydoc --model gpt:small --batch 16 --steps 1000 --checkpoint out/gpt

Options are those of `chorus train`. Its layout and micro-batches are searched for, with --compress also layouts with
that compression of gradients. The units of the model are measured for some seconds. Memory is the engines' own
forecast. With --run the first layout is trained.
"""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import check_folder, write
from collectives.cli import launcher
from collectives.cli.launcher import at_least, say
from parallel.checkpoint.checkpoint_files import CheckpointError
from parallel.cli import train
from parallel.cli.plan_arguments import expect_writable
from parallel.cli.reports.plan_plots import draw_step
from parallel.cli.train_arguments import add_files, add_settings, argument_error, picture_error
from parallel.engine import settings
from parallel.engine.grad_compression import AUTO, NONE, parse
from parallel.engine.settings import Settings
from parallel.planning.measured.layout_choice import LayoutChoice, LayoutForecast, Refusal
from parallel.runtime import resources
from parallel.runtime.collective_errors import collective_call
from parallel.trainer.recipes import complete

USUAL = ("search", "run", "top", "limit", "plan_plot", "plan_json", "data", "model", "batch", "steps", "checkpoint")
"""Options in --help. --help-all has the others."""

FOUND = ("layout", "mesh", "accumulate", "microbatches", "virtual", "cuts", "recompute")
"""Settings that are searched for."""


def add_own(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("plan").add_argument
    add("--search", action="store_true", help="print the layouts")
    add("--run", action="store_true", help="print the layouts, and train with the fastest")
    add("--top", type=at_least(1, int), default=5, metavar="K", help="layouts to print (default 5)")
    add("--limit", type=at_least(1, float), metavar="BYTES", help="memory of a rank (default: its share of the node's)")
    add("--plan-plot", type=Path, metavar="FILE", help="timeline of the predicted step of the fastest, as a picture")
    add("--plan-json", type=Path, metavar="FILE", help="all layouts, with seconds, bytes and reasons, for programs")


def words_of(found: Settings, compress: bool = False) -> list[str]:
    """Options of `chorus train` for a layout. With `compress`, also the option of no compression.

    >>> words_of(Settings(layout="dp", mesh="dp=2,tp=2", accumulate=2, recompute="none"))
    ['--layout', 'dp', '--mesh', 'dp=2,tp=2', '--accumulate', '2']
    """
    values = {name: getattr(found, name) for name in FOUND}
    values = {name: value for name, value in values.items() if value not in (None, NONE)}
    if compress or found.compress != NONE:
        values["compress"] = found.compress
    return [word for name, value in values.items() for word in (settings.OPTIONS[name].argument, str(value))]


def report(fitting: list[LayoutForecast], refused: list[Refusal], top: int) -> Iterator[str]:
    """Lines: the fastest layouts with their parts, and how many were rejected for which reason."""
    yield f"{len(fitting) + len(refused)} layouts, of which {len(fitting)} fit"
    if fitting:
        yield f"{'MB':>9}{'ms':>9}{'slower':>8}  options; parts of the step, predicted"
    for each in fitting[:top]:
        seconds = each.step.seconds
        slower = f"{seconds / fitting[0].step.seconds - 1:.0%}"
        yield f"{each.nbytes / 1e6:9.1f}{1e3 * seconds:9.2f}{slower:>8}  {shlex.join(words_of(each.settings))}"
        parts = sorted(each.step.parts.items(), key=lambda item: -item[1])
        yield f"{'':28}{', '.join(f'{cause} {share / seconds:.0%}' for cause, share in parts if share > seconds / 200)}"
    for reason, count in Counter(each.reason for each in refused).most_common(top):
        first = next(each for each in refused if each.reason == reason)
        yield f"{count} rejected, as {shlex.join(words_of(first.settings))}: {reason}"


def as_dict(fitting: list[LayoutForecast], refused: list[Refusal]) -> dict[str, Any]:
    """All layouts for programs."""
    return {
        "choices": [
            {
                "settings": asdict(each.settings),
                "seconds": each.step.seconds,
                "parts": dict(each.step.parts),
                "memory": each.memory,
            }
            for each in fitting
        ],
        "rejected": [{"settings": asdict(each.settings), "reason": each.reason} for each in refused],
    }


def main(argv: list[str] | None = None) -> int:
    """Print the layouts, and train with --run. Exit status 1 if none fits, 2 if the settings are invalid."""
    parser = launcher.LauncherParser(__doc__, USUAL, usage="%(prog)s [options]")
    add_own(parser)
    add_settings(parser)
    add_files(parser)
    args = parser.parse_args(argv)
    comm = Communicator(MPI.COMM_WORLD)
    given = {name: getattr(args, name, None) for name in settings.OPTIONS}
    try:
        if problem := argument_error(args) or picture_error("--plan-plot", args.plan_plot) or _searched_for(args):
            raise ValueError(problem)
        _check_files(comm, args)
        chosen = complete(given)
        if chosen.compress not in (NONE, AUTO):
            parse(chosen.compress)
        train.limit_threads(comm, args, chosen)
        limit = args.limit or (resources.node_memory() or float("inf")) / comm.Get_size()
        fitting, refused = LayoutChoice(comm, comm.bcast(limit)).search(chosen)
    except (ValueError, CheckpointError) as error:
        parser.error(str(error))
    for line in report(fitting, refused, args.top):
        say(line)
    if comm.Get_rank() == 0:
        write(args.plan_json, as_dict(fitting, refused))
    if args.plan_plot and fitting and comm.Get_rank() == 0:
        draw_step(args.plan_plot, f"{chosen.model}: {shlex.join(words_of(fitting[0].settings))}", fitting[0].step)
    if not fitting or not args.run:
        return 0 if fitting else 1
    given_words = _words_for_training(sys.argv[1:] if argv is None else argv)
    # --compress auto is among the given words: the later --compress, even none, overrides it
    words = [*given_words, *words_of(fitting[0].settings, compress=chosen.compress != NONE)]
    say(f"chorus train -n {comm.Get_size()} {shlex.join(words)}")
    return train.main(words)


def _check_files(comm: Communicator, args: argparse.Namespace) -> None:
    """Raise an error on all ranks if a file cannot be written. With --run, also a file of the training."""
    for name in ("plan_json", "plan_plot", *(("json", "plot", "trace", "checkpoint") if args.run else ())):
        if path := getattr(args, name):
            check = check_folder if name == "checkpoint" else expect_writable
            collective_call(comm, partial(check, path), f"--{name.replace('_', '-')}", root=0)
    if args.run and (args.resume or args.checkpoint):  # only for its errors, before the search
        train.resumed(comm, args, train.is_restarted(train.job_of(comm)))


def _searched_for(args: argparse.Namespace) -> str | None:
    """Text if an option is given whose value the search finds. Otherwise None."""
    for name in FOUND:
        if (value := getattr(args, name)) is not None:
            return f"{settings.OPTIONS[name].argument}: expected none, as the search finds it; found {value}"
    return None


def _words_for_training(words: list[str]) -> list[str]:
    """Words of the command line without the options of `add_own`."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_own(own)
    return own.parse_known_args(words)[1]
