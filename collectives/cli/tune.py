"""Measure which algorithm is fastest on this machine, per collective and size, and store the times for `auto`.

chorus tune -n 2
chorus tune -n 4 --collective allreduce,broadcast --sizes 8:16M:4
chorus tune --show

Each number of ranks, and each way to place them on nodes, is measured by a launch of its own. All share one
file per machine and MPI. An interrupted launch keeps its measurements.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.cases import CASES, DTYPES
from collectives.benchmark.reports import check_writable
from collectives.benchmark.size_arguments import parse_sizes
from collectives.benchmark.timing import MODES
from collectives.benchmark.tuner import TunerCandidates, TunerSetting, candidates, contest, fastest, measure_costs
from collectives.cli import launcher
from collectives.cli.arguments import names_of
from collectives.cli.bench import collective_list
from collectives.selection import timing_file
from collectives.selection.timing_file import DamagedTable, TableError
from collectives.selection.timing_table import NATIVE, AlgorithmChoice, Row, TimingKey, TimingTable, shape
from collectives.units import format_bytes, format_time

EVEN = [name for name in CASES if not name.endswith("v")]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    add, count, seconds = parser.add_argument, launcher.at_least(1, int), launcher.at_least(0, float)
    names = "names, or all (default: even ones)"
    add("--collective", type=collective_list, default=EVEN, metavar="NAME,...", help=names)
    add("--sizes", type=parse_sizes, default="8:32M:8", metavar="SIZES", help="8:64M:4, or 8,1K,64K (default 8:32M:8)")
    forms = names_of("form", MODES)
    add("--form", type=forms, default="blocking", metavar="NAME,...", help=f"of {', '.join(MODES)}")
    add("--dtype", choices=list(DTYPES), default="float32", metavar="NAME", help=f"one of {', '.join(DTYPES)}")
    add("--seconds", type=seconds, default=0.1, metavar="S", help="per candidate and row (default 0.1)")
    add("--iterations", type=count, default=500, metavar="N", help="timed calls, at most (default 500)")
    table = timing_file.default_path()
    add("--table", type=Path, default=table, metavar="FILE", help="instead of the one in the cache directory")
    add("--show", action="store_true", help="measure nothing: print the table")
    return parser.parse_args(argv)


def known(path: Path, reads_only: bool) -> tuple[TimingTable | None, str | None]:
    """Read the timing table at `path`, an empty one if missing or damaged; return it and a remark or None.

    The table is None if the file cannot be written, or must not be changed: it is of a newer version, or of another
    machine.
    """
    try:
        if not reads_only:
            check_writable(path)
        return timing_file.read(path), None
    except FileNotFoundError:
        return TimingTable(), None
    except DamagedTable as error:
        if reads_only:
            return TimingTable(), str(error)
        if is_own(path.read_bytes()):
            return TimingTable(), f"{error}; it is begun anew"
        return None, f"{path}: expected a timing table, found another file; {ADVICE}"
    except (OSError, TableError) as error:
        return None, f"{error}; {ADVICE}"


ADVICE = "move it away, or choose another with --table"


def is_own(content: bytes) -> bool:
    """True for a timing table, or what an interrupted write left of one."""
    return timing_file.FORMAT.encode() in content or len(content) < 2


def settings(args: argparse.Namespace) -> Iterator[TunerSetting]:
    """Settings to measure, small sizes first, so that an interrupted launch covers all collectives."""
    for nbytes in args.sizes:
        for collective in args.collective:
            if collective != "barrier" or nbytes == args.sizes[0]:
                for form in args.form:
                    yield TunerSetting(collective, form, args.dtype, 0 if collective == "barrier" else nbytes)


def tune(args: argparse.Namespace, table: TimingTable) -> tuple[TimingTable, Counter[str], int]:
    """Measure all rows, saving each in the file. Return the table, wins by algorithm, and number of wrong results."""
    plain = MPI.COMM_WORLD
    rank, size = plain.Get_rank(), plain.Get_size()
    with Communicator(plain, tuning=False) as comm:
        costs = measure_costs(plain, comm, 10 * args.seconds, table.costs)
        table = table._replace(costs=costs)
        for name, wire in costs._asdict().items():
            speed = f"{1e-9 / wire.beta:.2f} GB/s, combining {1e-9 / wire.gamma:.2f} GB/s"
            launcher.say(f"{name:<16}{format_time(wire.alpha)} a message, {speed}")
        todo, wrong = list(settings(args)), 0
        fields: defaultdict[tuple[str, ...], TunerCandidates] = defaultdict(TunerCandidates)
        wins: Counter[str] = Counter()
        limits = {"iterations": args.iterations, "seconds": args.seconds, "warmup": 10}
        with launcher.progress(len(todo), "tuning", "row", prints=True) as bar:
            for setting in todo:
                bar.set_postfix_str(f"{setting.collective} {format_bytes(setting.nbytes)}")
                field = fields[setting[:3]]
                able = candidates(setting.collective, setting.nbytes, size, comm.nodes, costs)
                nbytes, row, absent = contest(plain, comm, setting, field.left(able), limits)
                field.note(row)
                launcher.say(f"{setting.collective:<16}{cells(nbytes, row)}")
                for choice, reason in absent.items():
                    launcher.say(f"# no {choice}: {reason}")
                    wrong += reason.startswith("wrong")
                if row:
                    wins[fastest(row).algorithm] += 1
                    key = TimingKey(setting.collective, setting.form, size, shape(comm.nodes, size))
                    table = table.merged(TimingTable(costs, {key: {nbytes: row}}))
                    if rank == 0:
                        timing_file.write(args.table, table)
                bar.update()
    return table, wins, wrong


def cells(nbytes: int, row: Row) -> str:
    """Format one size as a table row: the fastest algorithm and its time, the MPI's own time, and their ratio."""
    if not row:
        return f"{format_bytes(nbytes):<12} no candidate took part"
    best = fastest(row)
    native = row.get(AlgorithmChoice(NATIVE))
    against = f"{native * 1e6:>12.2f} {row[best] / native:>7.2f}" if native else f"{'-':>12} {'-':>7}"
    return f"{format_bytes(nbytes):<12} {best!s:<28} {row[best] * 1e6:>12.2f} {against}"


HEADING = f"{'# Size':<12} {'Winner':<28} {'Time(us)':>12} {'Native(us)':>12} {'Ratio':>7}"


def main() -> int:
    """Measure, or show the table. Return 1 if a result was wrong or the table could not be used, else 0."""
    args = parse()
    plain = MPI.COMM_WORLD
    # read by one rank, so that all go on or end alike
    table, message = plain.bcast(known(args.table, args.show) if plain.Get_rank() == 0 else None)
    if table is None:
        launcher.end_with(message)
    if message:
        launcher.say(f"# {message}")
    launcher.say(f"# {timing_file.mpi_name()}; {plain.Get_size()} ranks; {timing_file.machine()}")
    launcher.say(f"# {args.table}")
    wrong = 0
    if args.show:
        for key, rows in sorted(table.entries.items()):
            launcher.say(f"\n# {key.collective}, {key.form}, {key.ranks} ranks on nodes of {key.placement}\n{HEADING}")
            for nbytes, row in rows.items():
                launcher.say(cells(nbytes, row))
    else:
        table, wins, wrong = tune(args, table)
        launcher.say("# winners: " + ", ".join(f"{name} {times}" for name, times in wins.most_common()))
    winners = [fastest(row).algorithm for rows in table.entries.values() for row in rows.values()]
    won = winners.count(NATIVE)
    launcher.say(f"# in the table: {len(winners)} rows; the MPI's own collective is the fastest in {won}")
    return int(wrong > 0)


if __name__ == "__main__":
    launcher.run(main)
