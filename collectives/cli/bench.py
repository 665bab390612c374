"""Benchmark the collectives of Chorus against the MPI library's, or PyTorch's over Chorus and over gloo.

chorus bench collectives -n 2 --collective allreduce --sizes 8:64M --plot race.png
chorus bench collectives -n 2 --collective all --sizes 8:256M:8 --against gloo

Several launches are better evidence than a long one: write each with --json,
then join them with --merge a.json b.json.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms import catalog
from collectives.benchmark import result_table
from collectives.benchmark.calibrate import SWEEPS, calibrate, lengths
from collectives.benchmark.cases import CASES, DTYPES, MEMORIES, CaseBuffers, elements, even_form
from collectives.benchmark.measure import RaceOptions, enter, measure
from collectives.benchmark.reports import read_report, write
from collectives.benchmark.result_rows import KEY, Report, Row, checked_report, make_report, make_row, merge
from collectives.benchmark.size_arguments import parse_sizes
from collectives.benchmark.timing import MODES, Contestant, race
from collectives.cli import launcher
from collectives.cli.algorithm_file import entry_name
from collectives.cli.arguments import expect_writable, names_of, picture_file, words
from collectives.selection.timing_table import NATIVE
from collectives.units import format_bytes

TURNS = 15
LENGTH = 256
"""Rows and columns of the matrices that are multiplied as work."""


def works(plain: MPI.Intracomm, milliseconds: float) -> dict[str, Callable[[], Any]]:
    """Work of this length by name: sleep (the core is free for others) and matrix products. Collective."""
    left, out = np.ones((2, LENGTH, LENGTH))

    def multiply(count: int) -> None:
        for _ in range(count):
            np.matmul(left, left, out=out)

    multiply(10)
    least = min(slowest_ms(plain, partial(multiply, 10)) for _ in range(5)) / 10
    count = max(1, round(milliseconds / least))
    return {"sleep": partial(time.sleep, milliseconds / 1e3), "matmul": partial(multiply, count)}


def slowest_ms(plain: MPI.Intracomm, call: Callable[[], Any]) -> float:
    """Milliseconds of a call on the slowest rank. A barrier precedes it. Collective."""
    plain.Barrier()
    start = time.perf_counter()
    call()
    return float(plain.allreduce(time.perf_counter() - start, MPI.MAX)) * 1e3


def hidden_share(alone: float, work: float, both: float) -> float:
    """Share of a collective's time that both together do not take longer than the work, from 0 to 1."""
    return min(1.0, max(0.0, 1 - (both - work) / alone)) if alone else 0.0


def overlap_lines(plain: MPI.Intracomm, collective: str, nbytes: int, dtype: str, milliseconds: float) -> Iterator[str]:
    """Yield a line for each communicator and kind of work: medians in ms, and `hidden_share`. Collective.

    A communicator that refuses the call has a line with the reason.
    """
    case, kind = CASES[collective], DTYPES[dtype]
    ours = {"Chorus": False, "async_progress": True}
    comms: dict[str, Any] = {name: Communicator(plain, async_progress=value) for name, value in ours.items()}
    for name, comm in {"MPI": plain, **comms}.items():
        buffers = CaseBuffers(case, comm, elements(case, nbytes, kind.itemsize, plain.Get_size()), kind)
        entry = enter(plain, comm, NATIVE if comm is plain else name, {}, buffers, MODES[1])
        if isinstance(entry, str):
            yield f"{name:>14} refused: {entry}"
            continue
        start = partial(getattr(comm, f"I{case.method.lower()}"), *buffers.args)
        for label, work in works(plain, milliseconds).items():

            def both(start: Any = start, work: Any = work) -> None:  # defaults: bound in this turn of the loop
                request = start()
                work()
                request.Wait()

            calls = (lambda start=start: start().Wait(), work, both)
            times = [[slowest_ms(plain, call) for call in calls] for _ in range(TURNS)]
            alone, busy, joint = np.median(times[2:], axis=0)
            share = hidden_share(alone, busy, joint)
            yield f"{name:>14} {label:>7} {alone:8.2f} {busy:8.2f} {joint:8.2f} {share:7.0%}"
    for comm in comms.values():
        comm.close()


NEAR_BEST, NEAR_EXPECTED = 0.10, 0.25
"""Largest relative differences that count as near."""

POINT = tuple(name for name in KEY if name != "algorithm")


class Verdict(NamedTuple):
    """Counts of points. A point is a collective at one size, with one dtype, memory and form."""

    compared: int  #: points at which ``auto`` and at least one algorithm were measured
    near_best: int  #: of these, ``auto`` takes at most `NEAR_BEST` longer than the fastest algorithm
    expected: int  #: points at which ``auto`` has an expected time
    near_expected: int  #: of these, the expected time differs from the measured one by at most `NEAR_EXPECTED`

    def lines(self) -> list[str]:
        """Comment lines of the text output: none if nothing was compared."""
        if not self.compared:
            return []
        return [
            f"# auto: {self.near_best} of {self.compared} points within {NEAR_BEST:.0%} of the best algorithm",
            f"# auto's expected time: {self.near_expected} of {self.expected} points within {NEAR_EXPECTED:.0%} "
            "of the measured time",
        ]


def judge(rows: list[Row]) -> Verdict:
    """Count the points of result rows at which ``auto`` is near the best algorithm and near its expected time."""
    points: defaultdict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        points[tuple(row.get(name) for name in POINT)][row["algorithm"]] = row
    compared = near_best = expected = near_expected = 0
    for by_name in points.values():
        auto = by_name.pop("auto", None)
        if auto is None or not by_name:
            continue
        best = min(row["ours_us"] for row in by_name.values())
        compared += 1
        near_best += auto["ours_us"] <= (1 + NEAR_BEST) * best
        if auto.get("expected_us") is not None:
            expected += 1
            near_expected += abs(auto["expected_us"] - auto["ours_us"]) <= NEAR_EXPECTED * auto["ours_us"]
    return Verdict(compared, near_best, expected, near_expected)


LONGEST = 1 << 26
"""Bytes up to which messages are timed. Longer ones are extrapolated."""

REPORT = "a report of chorus bench collectives --json"

MODE_HELP = ("plain calls, the default", "time I... and Wait", "time Start and Wait")

USUAL = ("collective", "algorithm", "sizes", "against", "dtype", "seconds", "full", "json", "plot", "merge")
"""Options in --help. --help-all has the others."""

collective_list = names_of("collective", CASES)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__, USUAL)
    add, count = parser.add_argument, launcher.at_least(1, int)
    add("--collective", type=collective_list, default="allreduce", metavar="NAME,...", help="names, or all")
    add(
        "--algorithm",
        type=words,
        default="auto",
        metavar="NAME,...",
        help="auto, names, file.py:function, or all (default auto)",
    )
    add("--segments", type=launcher.at_least(1, int, 1 << 16), metavar="K", help="pipeline each message in K segments")
    add("--sizes", type=parse_sizes, default="8:64M", metavar="SIZES", help="8:64M:4, or 8,1K,64K (default 8:64M)")
    add("--against", choices=("native", "none", "gloo"), default="native", help="what to race (default native)")
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
    # no default of the option: `append_const` would add to it
    args.modes = list(dict.fromkeys(args.modes or MODES[:1]))
    try:
        args.algorithms = {collective: resolve(collective, args.algorithm) for collective in args.collective}
    except ValueError as error:
        parser.error(f"argument --algorithm: {error}")
    chosen = [*args.algorithms.values(), *args.dtype, *args.memory, *args.modes, args.in_place, args.segments]
    usual = [*[["auto"]] * len(args.algorithms), "float32", "plain", MODES[0], False, None]
    if args.against == "gloo" and chosen != usual:
        parser.error("argument --against: gloo races blocking calls of torch.distributed on float32, without options")
    try:
        args.merge = args.merge and merge([read_report(path, REPORT, checked_report) for path in args.merge])
    except ValueError as error:
        parser.error(f"argument --merge: {error}")
    expect_writable(parser, args.json, args.plot)
    return args


def resolve(collective: str, wanted: Iterable[str]) -> list[str]:
    """Algorithm names for one collective: ``all`` becomes ``auto`` and every known one. ValueError for unknown ones."""
    even = even_form(collective)
    wanted = [
        entry_name(even, name, launcher.world_size()) if name.partition(":")[0].endswith(".py") else name
        for name in wanted
    ]
    known = ["auto", *catalog.names(even)]
    for name in wanted:
        if name not in ("all", *known):
            raise ValueError(f"{collective} has no algorithm {name!r}; known: {', '.join(known)}")
    names = list(dict.fromkeys(name for word in wanted for name in (known if word == "all" else [word])))
    if not names:
        raise ValueError(f"expected a name, found none; known: {', '.join(known)}")
    return names


def configurations(args: argparse.Namespace, ranks: int) -> Iterator[tuple[str, str, int]]:
    """Yield (collective, dtype, bytes) of all measurements. Sizes that round to the same one occur once."""
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
    with launcher.progress(len(todo), "racing", "row", prints=True) as bar:
        for collective, dtype, nbytes in todo:
            bar.set_postfix_str(f"{collective} {format_bytes(nbytes)}")
            rows, absent = measure(plain, comm, collective, args.algorithms[collective], nbytes, dtype, options)
            missing = [f"# {collective} {nbytes}: no {name}: {reason}" for name, reason in absent.items()]
            for line in (*style.lines(rows), *missing):
                launcher.say(line)
            if "auto" in absent:  # a named algorithm may refuse a call
                raise RuntimeError(f"{collective} of {nbytes} bytes of {dtype} failed: {absent['auto']}")
            report["rows"] += rows
            bar.update()
    return report


def bench_torch(args: argparse.Namespace) -> Report:
    """Race calls of torch.distributed over our backend and over gloo. Print and return rows, gloo's as native."""
    from collectives.torch import race_cases

    plain = MPI.COMM_WORLD
    report = make_report(plain.Get_size(), [], against="gloo")
    launcher.say("\n".join([*result_table.preamble(report), "# through torch.distributed; native is gloo"]))
    style, groups = result_table.TableStyle(args.full), race_cases.groups()
    limits = {name: getattr(args, name) for name in ("iterations", "warmup", "seconds")}
    for collective, size in product([name for name in args.collective if name in race_cases.CASES], args.sizes):
        if collective == "barrier" and size != args.sizes[0]:  # it has no size: one row
            continue
        buffers: list[Any] = [race_cases.RaceBuffers(group, collective, size) for group in groups]
        ours, gloo = race(plain, [Contestant("", each, each.call) for each in buffers], **limits)
        row = make_row(collective, "auto", plain.Get_size(), buffers[0].whole.nbytes, ours, gloo, mode="blocking")
        launcher.say("\n".join(style.lines([row])))
        report["rows"].append(row)
    return report


def show_overlap(args: argparse.Namespace) -> None:
    """Print how much of each collective's time is hidden beside other work."""
    plain = MPI.COMM_WORLD
    for collective, dtype, nbytes in configurations(args, plain.Get_size()):
        launcher.say(f"# {collective} of {format_bytes(nbytes)}, {dtype}, beside work of {args.beside:g} ms")
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
    report = show_merged(args) if args.merge else (bench_torch if args.against == "gloo" else bench)(args)
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
