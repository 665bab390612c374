"""Inject faults into a program of mpi4py, one in each run, and show what is reported, and after how long.

    chorus drill -n 4 program.py arguments
    chorus drill -n 4 --kinds kill,stop --times 10 --seed 3 program.py

The program runs as under ``chorus run``: first undisturbed, then once for each fault, at a random call of some rank.
  stop, kill       SIGSTOP and SIGKILL
  raise, exit      an exception, and sys.exit(3), in place of the call
  skip, more       the call is not made, or made twice
  diverge          a broadcast before the call
  delay, corrupt   a second's wait before the call, and a bit of its first array changed

The table has the first report after each fault, its seconds, and those of the end of the program. The status is 1 if a
program did not end.
"""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import REMAINDER, Namespace
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from collectives.cli.arguments import names_of
from collectives.cli.faults import KINDS, MARK, Fault
from collectives.cli.launcher import ProgramParser, at_least
from collectives.runtime.record.causes import causes
from collectives.runtime.record.reader import ProcessState, in_folder

PATIENCE, TIMEOUT = 2.0, 4.0
"""Seconds after which a run reports, and ends, if nothing moves."""

LONGEST = 10.0
"""Seconds of a run more than the undisturbed one and `TIMEOUT`, after which it hangs."""

REPORTS = re.compile(
    r"(?P<cause>cause: .*|chorus: rank.*)|"
    r"^(\w+\.)*\w*Error: .*|^collectives\.\S+: .*|.*(KILLED BY|on|\() ?signal:? \d+.*",
    re.I,
)
"""Lines that report a fault: causes that this package has found, other errors, and lines of launchers."""


MOST = 1 << 20
"""Bytes of the output that are searched."""


class Outcome(NamedTuple):
    """Outcome of a run: seconds are from the fault on, or from the start without one."""

    status: int | None
    """None: it had to be killed."""

    report: str
    reported: float
    ended: float
    text: str


def parse(words: Sequence[str] | None = None) -> Namespace:
    parser = ProgramParser(
        __doc__, usage="chorus drill -n RANKS [options] program.py | -m module | -c text [arguments]"
    )
    parser.add_argument("-n", type=at_least(1, int), required=True, metavar="RANKS", help="ranks of each run")
    parser.add_argument(
        "--kinds", type=names_of("fault", KINDS), default=list(KINDS), metavar="LIST", help="of faults (default all)"
    )
    parser.add_argument("--times", type=at_least(1, int), metavar="N", help="runs (default one of each kind)")
    parser.add_argument("--seed", type=at_least(0, int), default=0, metavar="S", help="of ranks and calls (default 0)")
    parser.add_argument("program", nargs=REMAINDER, metavar="program.py", help="and its arguments")
    options = parser.parse_args(words)
    if not options.program:
        parser.error(f"expected a program, as in {parser.usage}")
    return options


def launch(
    ranks: int,
    program: Sequence[str],
    folder: Path,
    longest: float,
    planned: Fault | None = None,
    start: Sequence[str] = (),
) -> Outcome:
    """Run a program, with records in a folder, for so many seconds at most. `start`: of another command for it."""
    command = [*start] or [sys.executable, "-m", "parallel.cli.main", "run", "-n", str(ranks)]
    command += [*([] if planned is None else ["--fault", str(planned)]), *program]
    times = {"CHORUS_PATIENCE": str(PATIENCE), "CHORUS_TIMEOUT": str(TIMEOUT), "CHORUS_RECORD": str(folder)}
    began, reported, text, status = time.monotonic(), 0.0, "", None
    with tempfile.TemporaryFile("w+b") as output:
        process = subprocess.Popen(
            command, env=os.environ | times, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        is_injected = planned is None
        while status is None and time.monotonic() - began < longest:
            time.sleep(0.02)
            status = process.poll()
            text = os.pread(output.fileno(), MOST, 0).decode(errors="replace")
            if not is_injected and MARK in text:
                is_injected, began = True, time.monotonic()
            if not reported and any(map(REPORTS.search, text.splitlines())):
                reported = time.monotonic() - began
        if status is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ended_after = time.monotonic() - began
    return Outcome(status, report_of(text, status, folder), reported or ended_after, ended_after, text)


def report_of(text: str, status: int | None, folder: Path) -> str:
    """Cause in the output of a run, or after a failure in its records; else another line on an error."""
    found = [match for match in map(REPORTS.search, text.splitlines()) if match]
    caused = [match[0] for match in found if match["cause"]]
    if not caused and status:
        ended = [one._replace(process=ProcessState.HAS_ENDED) for one in in_folder(folder)]
        caused = [f"records: {cause}" for cause in causes(ended, time.monotonic_ns())]
    return (caused or [match[0].strip() for match in found] or [""])[0]


def table(runs: Sequence[tuple[Fault, Outcome]]) -> list[str]:
    """Lines of a table."""
    heads = "fault", "reported after", "ended after", "status", "report"
    cells = [heads]
    for planned, found in runs:
        reported = f"{found.reported:.1f} s" if found.report else "-"
        status = "hangs" if found.status is None else str(found.status)
        cells.append((str(planned), reported, f"{found.ended:.1f} s", status, found.report or "none"))
    widths = [max(map(len, column)) for column in list(zip(*cells))[:-1]]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]) for row in cells]


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    chosen, runs = random.Random(options.seed), list[tuple[Fault, Outcome]]()
    with tempfile.TemporaryDirectory(prefix="chorus-drill-") as name:
        first = launch(options.n, options.program, Path(name), 600.0)
        if first.status:
            print(first.text, file=sys.stderr)
            raise SystemExit(f"chorus drill: error: expected a program that ends well, found status {first.status}")
        calls = {one.rank: int(one.header["last"]) for one in in_folder(Path(name))}  # before the folder goes
    ranks = [rank for rank, count in sorted(calls.items()) if count]
    if not ranks:
        raise SystemExit("chorus drill: error: expected a program that makes collective calls, found none")
    print(f"undisturbed: {first.ended:.1f} s, {max(calls.values())} calls", flush=True)
    for kind in islice(cycle(options.kinds), options.times or len(options.kinds)):
        rank = chosen.choice(ranks)
        planned = Fault(kind, rank, chosen.randint(1, calls[rank]))
        with tempfile.TemporaryDirectory(prefix="chorus-drill-") as name:
            found = launch(options.n, options.program, Path(name), first.ended + TIMEOUT + LONGEST, planned)
        runs.append((planned, found))
    print("\n".join(table(runs)))
    return int(any(found.status is None for _, found in runs))
