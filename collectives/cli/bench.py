"""Race our collectives against the MPI's own.

chorus bench collectives -n 2 --collective allreduce --sizes 8:64M --plot race.png

Several launches say more than a long one: write each with --json,
then join them with --merge a.json b.json.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.benchmark import chorus_side, result_table
from collectives.benchmark.calibrate import SWEEPS, CalibratedCosts, calibrate, lengths
from collectives.benchmark.cases import ALIASES, CASES, DTYPES, MEMORIES, elements
from collectives.benchmark.measure import measure
from collectives.benchmark.result_rows import Report, Row, make_report, merge, write_report
from collectives.benchmark.size_arguments import format_size, parse_sizes
from collectives.benchmark.timing import MODES
from collectives.cli import launcher

LONGEST = 1 << 26
"""Bytes up to which messages are timed; longer ones are taken to cost as much more a byte."""


def words(text: str) -> list[str]:
    """A comma-separated list without blanks and repetitions."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def collective_list(text: str) -> list[str]:
    """Collective names from the command line; ``all`` and the MPI's spelling ``bcast`` are understood."""
    known = chorus_side.known_collectives()
    said = [ALIASES.get(word, word) for word in words(text.lower())]
    names = known if "all" in said else list(dict.fromkeys(said))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown collective {name!r}; known: {', '.join(known)}, all")
    return names


def dtype_list(text: str) -> list[str]:
    """dtype names from the command line."""
    for name in words(text):
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return words(text)


def memory_list(text: str) -> list[str]:
    """Kinds of memory from the command line."""
    for name in words(text):
        if name not in MEMORIES:
            raise argparse.ArgumentTypeError(f"unknown memory {name!r}; known: {', '.join(MEMORIES)}")
    return words(text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; errors are shown by rank 0 and end all ranks with the same code."""
    parser = launcher.LauncherParser(__doc__)
    add = parser.add_argument
    add("--collective", type=collective_list, default="allreduce", metavar="NAME,...", help="names, or all")
    add(
        "--algorithm",
        type=words,
        default="auto",
        metavar="NAME,...",
        help="auto, names, or all (default auto)",
    )
    add("--segments", type=launcher.at_least(1, int), metavar="K", help="pipeline each message in K segments")
    add(
        "--sizes",
        type=parse_sizes,
        default="8:64M",
        metavar="SIZES",
        help="8:64M, 8:64M:4, or 8,1K,64K (default 8:64M)",
    )
    add("--against", choices=("native", "none"), default="native", help="whom to race (default native)")
    add("--dtype", type=dtype_list, default="float32", metavar="NAME,...", help=", ".join(DTYPES))
    add("--memory", type=memory_list, default="plain", metavar="KIND,...", help=f"of {', '.join(MEMORIES)}")
    add("--in-place", action="store_true", help="pass MPI.IN_PLACE where the collective allows it")
    meanings = ("plain calls, the default", "time I... and Wait", "time Start and Wait")
    for mode, what in zip(MODES, meanings, strict=True):
        add(f"--{mode}", dest="modes", action="append_const", const=mode, help=f"{what}; several make one race")
    add("--no-model", dest="model", action="store_false", help="do not time messages to predict times from them")
    add(
        "--iterations",
        type=launcher.at_least(1, int),
        default=1000,
        metavar="N",
        help="timed calls, at most (default 1000)",
    )
    add(
        "--warmup",
        type=launcher.at_least(2, int),
        default=20,
        metavar="N",
        help="calls before these, at most (default 20)",
    )
    add("--seconds", type=launcher.at_least(0, float), default=1.0, metavar="S", help="time per row (default 1)")
    add("--seed", type=int, default=1, help="of the random order of contestants")
    add("-f", "--full", action="store_true", help="show min, max, p99 and iterations too")
    add("--json", metavar="FILE", help="write all rows to FILE")
    add("--plot", metavar="FILE", help="draw the race into FILE (PNG, SVG, PDF)")
    add("--merge", nargs="+", metavar="FILE", help="measure nothing: join the JSON files of several launches")
    args = parser.parse_args(argv)
    args.modes = list(dict.fromkeys(args.modes or MODES[:1]))
    try:
        for collective in args.collective:
            chorus_side.resolve(collective, args.algorithm)
    except ValueError as error:
        parser.error(f"argument --algorithm: {error}")
    if args.merge:
        try:
            args.merge = merge([json.loads(Path(name).read_text()) for name in args.merge])
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"argument --merge: {error}")
    trouble = MPI.COMM_WORLD.bcast(_unwritable(args) if MPI.COMM_WORLD.Get_rank() == 0 else None)
    if trouble:
        parser.error(trouble)
    return args


def _unwritable(args: argparse.Namespace) -> str | None:
    """Reason why a file is not writable, checked before the measurements; None if it is."""
    for option, name in (("--json", args.json), ("--plot", args.plot)):
        if name:
            try:
                Path(name).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                return f"argument {option}: {error}"
            if Path(name).is_dir() or not os.access(name if Path(name).exists() else Path(name).parent, os.W_OK):
                return f"argument {option}: cannot write {name}"
    if args.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            return "argument --plot: matplotlib is not installed; pip install 'chorus-mpi[plot]'"
    return None


def configurations(args: argparse.Namespace, ranks: int) -> Iterator[dict[str, Any]]:
    """All measurements of the command line; sizes that round to the same one occur once."""
    for collective in args.collective:
        for dtype in args.dtype:
            case, width = CASES[collective], DTYPES[dtype].itemsize
            sizes = [0] if collective == "barrier" else [elements(case, s, width, ranks) * width for s in args.sizes]
            for nbytes in dict.fromkeys(sizes):
                yield {"collective": collective, "dtype": dtype, "nbytes": nbytes}


def costs(
    args: argparse.Namespace, plain: MPI.Intracomm, comm: MPI.Intracomm
) -> dict[tuple[str, str], CalibratedCosts] | None:
    """Measure message costs in every memory and mode; None without predictions."""
    if not args.model or plain.Get_size() == 1:
        return None
    largest, forms = min(LONGEST, max(args.sizes)), list(product(args.memory, args.modes))
    kinds = 1 + (len(set(chorus_side.nodes(comm))) > 1)
    with launcher.progress(len(forms) * len(lengths(largest)) * SWEEPS * kinds, "timing messages", "length") as bar:
        return {form: calibrate(plain, comm, *form, largest, min(0.04, args.seconds / 4), bar.update) for form in forms}


def bench(args: argparse.Namespace) -> Report:
    """Run all measurements of the command line and print rows as they complete."""
    plain = MPI.COMM_WORLD
    comm = chorus_side.communicator(plain)
    report = make_report(plain.Get_size(), [], against=args.against)
    for text in result_table.preamble(report):
        launcher.say(text)
    known = costs(args, plain, comm)
    look = result_table.TableStyle(args.full, args.memory, args.modes)
    todo = list(configurations(args, plain.Get_size()))
    shown: Any = None
    limits = {
        "iterations": args.iterations,
        "warmup": args.warmup,
        "seconds": args.seconds,
        "seed": args.seed,
    }
    with launcher.progress(len(todo), "racing", "row") as bar:
        for setting in todo:
            bar.set_postfix_str(f"{setting['collective']} {format_size(setting['nbytes'])}")
            rows, absent = measure(
                plain, comm, algorithms=chorus_side.resolve(setting["collective"], args.algorithm), modes=args.modes,
                memories=args.memory, in_place=args.in_place, segments=args.segments, against=args.against,
                costs=known, **setting, **limits,
            )  # fmt: skip
            for row in rows:
                if look.block_of(row) != shown:
                    show_title(row, look)
                    shown = look.block_of(row)
                launcher.say(look.line(row))
            for name, reason in absent.items():
                launcher.say(f"# {setting['collective']} {setting['nbytes']}: no {name}: {reason}")
            if "auto" in absent:
                raise RuntimeError(f"{setting} failed: {absent['auto']}")
            report["rows"] += rows
            bar.update()
    return report


def show_title(row: Row, look: result_table.TableStyle) -> None:
    """Begin a new block of the table."""
    for text in ("", look.title(row), look.heading()):
        launcher.say(text)


def merged(args: argparse.Namespace) -> Report:
    """Join earlier reports and show the result."""
    report: Report = args.merge
    for text in [*result_table.preamble(report), f"# medians over {report['launches']} launches"]:
        launcher.say(text)
    shown: Any = None
    memories, modes = (list(dict.fromkeys(row[name] for row in report["rows"])) for name in ("memory", "mode"))
    look = result_table.TableStyle(args.full, memories, modes)
    for row in report["rows"]:
        if look.block_of(row) != shown:
            show_title(row, look)
            shown = look.block_of(row)
        launcher.say(look.line(row))
    return report


def main() -> int:
    """Measure or merge, write the files, and return 1 if any result was wrong."""
    args = parse()
    report = merged(args) if args.merge else bench(args)
    if MPI.COMM_WORLD.Get_rank() == 0:
        if args.json:
            write_report(args.json, report)
        if args.plot:
            from collectives.benchmark.race_plots import plot_race

            plot_race(args.plot, report)
    verdict = result_table.verdict(report["rows"])
    if verdict:
        launcher.say(verdict)
    wrong = sum(row["wrong"] + (row["native_wrong"] or 0) for row in report["rows"])
    if wrong:
        launcher.say(f"# WRONG: {wrong} elements differ from the expected result")
    return int(np.sign(wrong))


if __name__ == "__main__":
    launcher.run(main)
