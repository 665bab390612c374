"""Benchmark the collectives of Chorus against those of the MPI library.

chorus bench collectives -n 2 --collective allreduce --sizes 8:64M --plot race.png

Several launches are better evidence than a long one: write each with --json,
then join them with --merge a.json b.json.
"""

import argparse
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms import catalog
from collectives.benchmark import result_table
from collectives.benchmark.calibrate import SWEEPS, calibrate, lengths
from collectives.benchmark.cases import CASES, DTYPES, MEMORIES, elements, even_form
from collectives.benchmark.measure import RaceOptions, measure
from collectives.benchmark.overlap import overlap_lines
from collectives.benchmark.reports import read_report, write
from collectives.benchmark.result_rows import Report, checked_report, make_report, merge
from collectives.benchmark.size_arguments import format_size, parse_sizes
from collectives.benchmark.timing import MODES
from collectives.benchmark.verdict import judge
from collectives.cli import launcher
from collectives.cli.arguments import expect_writable, names_of, picture_file, words

LONGEST = 1 << 26
"""Bytes up to which messages are timed; longer ones are extrapolated."""

REPORT = "a report of chorus bench collectives --json"

MODE_HELP = ("plain calls, the default", "time I... and Wait", "time Start and Wait")

collective_list = names_of("collective", CASES)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    add, count = parser.add_argument, launcher.at_least(1, int)
    add("--collective", type=collective_list, default="allreduce", metavar="NAME,...", help="names, or all")
    add("--algorithm", type=words, default="auto", metavar="NAME,...", help="auto, names, or all (default auto)")
    add("--segments", type=launcher.at_least(1, int, 1 << 16), metavar="K", help="pipeline each message in K segments")
    add("--sizes", type=parse_sizes, default="8:64M", metavar="SIZES", help="8:64M:4, or 8,1K,64K (default 8:64M)")
    add("--against", choices=("native", "none"), default="native", help="collective to race (default native)")
    dtypes, memories = names_of("dtype", DTYPES), names_of("memory", MEMORIES)
    add("--dtype", type=dtypes, default="float32", metavar="NAME,...", help=", ".join(DTYPES))
    add("--memory", type=memories, default="plain", metavar="KIND,...", help=f"of {', '.join(MEMORIES)}")
    add("--in-place", action="store_true", help="pass MPI.IN_PLACE where the collective allows it")
    for mode, text in zip(MODES, MODE_HELP, strict=True):
        add(f"--{mode}", dest="modes", action="append_const", const=mode, help=f"{text}; several make one race")
    beside = launcher.at_least(0, float)
    add("--beside", type=beside, metavar="MS", help="race nothing: print how much is hidden beside MS ms of other work")
    add("--no-model", dest="model", action="store_false", help="do not time messages to predict times from them")
    add("--iterations", type=count, default=1000, metavar="N", help="timed calls, at most (default 1000)")
    warmup = launcher.at_least(2, int)
    add("--warmup", type=warmup, default=20, metavar="N", help="calls before these, at most (default 20)")
    add("--seconds", type=launcher.at_least(0, float), default=1.0, metavar="S", help="time per row (default 1)")
    add("-f", "--full", action="store_true", help="show min, max, p99 and iterations too")
    add("--json", type=Path, metavar="FILE", help="write all rows to FILE")
    add("--plot", type=picture_file, metavar="FILE", help="draw the race into FILE (PNG, SVG, PDF)")
    add(
        "--merge", nargs="+", type=Path, metavar="FILE", help="measure nothing: join the JSON files of several launches"
    )
    args = parser.parse_args(argv)
    args.modes = list(dict.fromkeys(args.modes or MODES[:1]))
    try:
        args.algorithms = {collective: resolve(collective, args.algorithm) for collective in args.collective}
    except ValueError as error:
        parser.error(f"argument --algorithm: {error}")
    try:
        args.merge = args.merge and merge([read_report(path, REPORT, checked_report) for path in args.merge])
    except ValueError as error:
        parser.error(f"argument --merge: {error}")
    expect_writable(parser, args.json, args.plot)
    return args


def resolve(collective: str, wanted: Iterable[str]) -> list[str]:
    """Algorithm names for one collective: ``all`` becomes ``auto`` and every known one; ValueError for unknown ones."""
    known = ["auto", *catalog.names(even_form(collective))]
    for name in wanted:
        if name not in ("all", *known):
            raise ValueError(f"{collective} has no algorithm {name!r}; known: {', '.join(known)}")
    names = list(dict.fromkeys(name for word in wanted for name in (known if word == "all" else [word])))
    if not names:
        raise ValueError(f"expected a name, found none; known: {', '.join(known)}")
    return names


def configurations(args: argparse.Namespace, ranks: int) -> Iterator[tuple[str, str, int]]:
    """Yield (collective, dtype, bytes) of all measurements; sizes that round to the same one occur once."""
    for collective in args.collective:
        for dtype in args.dtype:
            case, width = CASES[collective], DTYPES[dtype].itemsize
            sizes = dict.fromkeys(elements(case, size, width, ranks) * width for size in args.sizes)
            yield from ((collective, dtype, nbytes) for nbytes in sizes)


def bench(args: argparse.Namespace) -> Report:
    """Run all measurements of the command line, print rows as they complete, and return the report."""
    plain = MPI.COMM_WORLD
    comm = Communicator(plain)
    round_trip = comm.message_speed.round_trip or None
    report = make_report(plain.Get_size(), [], against=args.against, flag_round_trip=round_trip)
    style = result_table.TableStyle(args.full, args.memory, args.modes)
    launcher.say("\n".join(result_table.preamble(report)))
    costs = None
    if args.model and plain.Get_size() > 1:
        longest, forms = min(LONGEST, max(args.sizes)), list(product(args.memory, args.modes))
        count = len(forms) * len(lengths(longest)) * SWEEPS * (2 if comm.nodes else 1)
        with launcher.progress(count, "timing messages", "length") as bar:
            limit = min(0.04, args.seconds / 4)
            costs = {form: calibrate(plain, comm, *form, longest, limit, bar.update) for form in forms}
    limits = {name: getattr(args, name) for name in ("iterations", "warmup", "seconds")}
    options = RaceOptions(args.memory, args.modes, args.in_place, args.segments, args.against, costs, limits)
    todo = list(configurations(args, plain.Get_size()))
    with launcher.progress(len(todo), "racing", "row") as bar:
        for collective, dtype, nbytes in todo:
            bar.set_postfix_str(f"{collective} {format_size(nbytes)}")
            rows, absent = measure(plain, comm, collective, args.algorithms[collective], nbytes, dtype, options)
            missing = [f"# {collective} {nbytes}: no {name}: {reason}" for name, reason in absent.items()]
            for line in (*style.lines(rows), *missing):
                launcher.say(line)
            if "auto" in absent:
                raise RuntimeError(f"{collective} of {nbytes} bytes of {dtype} failed: {absent['auto']}")
            report["rows"] += rows
            bar.update()
    return report


def show_overlap(args: argparse.Namespace) -> None:
    """Print how much of each collective's time is hidden beside other work."""
    plain = MPI.COMM_WORLD
    for collective, dtype, nbytes in configurations(args, plain.Get_size()):
        launcher.say(f"# {collective} of {format_size(nbytes)}, {dtype}, beside work of {args.beside:g} ms")
        launcher.say(f"{'':>14} {'work':>7} {'alone':>8} {'work':>8} {'both':>8} {'hidden':>7}")
        for line in overlap_lines(plain, collective, nbytes, dtype, args.beside):
            launcher.say(line)


def show_merged(args: argparse.Namespace) -> Report:
    report: Report = args.merge
    memories, modes = (list(dict.fromkeys(row[name] for row in report["rows"])) for name in ("memory", "mode"))
    style = result_table.TableStyle(args.full, memories, modes)
    about = [*result_table.preamble(report), f"# medians over {report['launches']} launches"]
    launcher.say("\n".join([*about, *style.lines(report["rows"])]))
    return report


def main() -> int:
    args = parse()
    if args.beside is not None:
        show_overlap(args)
        return 0
    report = show_merged(args) if args.merge else bench(args)
    verdict = judge(report["rows"])
    report["verdict"] = verdict._asdict()
    if MPI.COMM_WORLD.Get_rank() == 0:
        write(args.json, report)
        if args.plot:
            from collectives.benchmark.race_plots import plot_race

            plot_race(args.plot, report)
    for line in (*result_table.model_errors(report["rows"]), *verdict.lines()):
        launcher.say(line)
    wrong = sum(row["wrong"] + (row["native_wrong"] or 0) for row in report["rows"])
    if wrong:
        launcher.say(f"# WRONG: {wrong} elements differ from the expected result")
    return int(wrong > 0)


if __name__ == "__main__":
    launcher.run(main)
