"""Command-line options of `chorus train` and `chorus plan`."""

import argparse
from pathlib import Path
from typing import Any

from collectives.cli.arguments import picture_file
from parallel.engine.option import names_in, options_in
from parallel.engine.settings import ALTERNATIVES, GROUPS


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add all options for training settings (fields of `Settings`), and --threads, to a parser."""
    for group in GROUPS:
        section = parser.add_argument_group(group.__doc__[0].lower() + group.__doc__[1:].rstrip("."))
        joint: dict[str, Any] = {}
        for names in ALTERNATIVES:
            if names[0] in names_in(group):
                joint |= dict.fromkeys(names, section.add_mutually_exclusive_group())
        for one in options_in(group):
            one.add_to(joint.get(one.name, section))
    threads = "BLAS threads per rank (default: cores that the node's ranks may use / their number; 1 if reproducible)"
    parser.add_argument("--threads", type=int, metavar="N", help=threads)


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the options of checkpoints, metrics, plot and trace, and of tests."""
    add = parser.add_argument_group("files").add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="folder of checkpoints")
    add("--every", type=int, metavar="N", help="steps between checkpoints (default: ten in all)")
    add("--keep", type=int, default=3, metavar="K", help="number of checkpoints to keep (default 3)")
    add(
        "--keep-best",
        type=int,
        default=0,
        metavar="K",
        help="keep also those of the K best tests, and write one at each",
    )
    add("--overwrite", action="store_true", help="replace the checkpoints in --checkpoint, once a new one is complete")
    add("--resume", nargs="?", const=True, metavar="CHECKPOINT", help="continue from this checkpoint, or the newest")
    add("--test-every", type=int, metavar="N", help="steps between tests (default: an epoch, or ten in all)")
    add(
        "--test-samples",
        type=int,
        metavar="N",
        help="most samples of a test (default: all; 256 of a text before the end)",
    )
    add("--json", type=Path, metavar="FILE", help="metrics, a line per step and a summary")
    add("--csv", type=Path, metavar="FILE", help="metrics as a table, a row per step")
    add("--tensorboard", type=Path, metavar="DIR", help="event files for TensorBoard (needs tensorboardX)")
    add("--plot", type=Path, metavar="FILE", help="learning curve as a picture")
    add("--trace", type=Path, metavar="FILE", help="trace of a few steps for ui.perfetto.dev")


MOST_THREADS = 1 << 16


def threads_error(args: argparse.Namespace) -> str | None:
    """Text if --threads is out of range. Otherwise None."""
    if args.threads is None or 1 <= args.threads <= MOST_THREADS:
        return None
    return f"--threads: expected {'1 or more' if args.threads < 1 else f'at most {MOST_THREADS}'}, found {args.threads}"


def argument_error(args: argparse.Namespace) -> str | None:
    for name in ("every", "keep", "test_every", "test_samples"):
        value = getattr(args, name)
        if value is not None and value < 1:
            return f"--{name.replace('_', '-')}: expected 1 or more, found {value}"
    if args.keep_best < 0 or (args.keep_best and args.checkpoint is None):  # apart, as 0 is its default
        return f"--keep-best: expected a number from 0 on, and --checkpoint DIR; found {args.keep_best}"
    if problem := threads_error(args):
        return problem
    if args.resume is True and args.checkpoint is None:
        return "--resume: expected --checkpoint DIR with the checkpoints, or the name of one"
    return picture_error("--plot", args.plot)


def picture_error(option: str, path: Path | None) -> str | None:
    """Text if `picture_file` refuses the path of an option. Otherwise None."""
    try:
        if path is not None:
            picture_file(str(path))
    except argparse.ArgumentTypeError as error:
        return f"{option}: {error}"
    return None
