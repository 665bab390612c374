"""Show what the ranks of this user's programs on this machine do: the call that each waits in, for whom, since when.

    chorus ps                    # once
    chorus ps --watch 1          # again every second, until Ctrl-C
    chorus ps --calls 5          # with the last five calls of each rank
    chorus ps records            # of files that CHORUS_RECORD=records has left, also of ranks that were killed

Every rank that has made a `Communicator` is shown. It needs no cooperation of the programs, which may hang or be
stopped. A rank that is not in a call is in its own program, or in a call of another library.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from collectives.benchmark.size_arguments import format_size
from collectives.cli.launcher import ProgramParser, at_least
from collectives.engine.instructions import CallState
from collectives.runtime.record.layout import RankState
from collectives.runtime.record.reader import RankRecord, in_folder, running

STOPPED = "Tt"
"""States of a process in /proc that SIGSTOP, or a debugger, has stopped."""


def describe_call(call: Any) -> str:
    """Collective, algorithm and data of a call."""
    root = "" if call["root"] < 0 else f" with root {call['root']}"
    kinds = [text.decode() for text in (call["dtype"], call["op"]) if text]
    data = ", ".join([format_size(int(call["nbytes"])), *[" ".join(kinds)] * bool(kinds)])
    return f"{call['collective'].decode()}{root} ({call['algorithm'].decode()}, {data})"


def seconds(nanoseconds: int) -> str:
    """Duration in a unit that suits it."""
    for unit, factor in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= factor:
            return f"{nanoseconds / factor:.3g} {unit}"
    return f"{nanoseconds} ns"


def condition(record: RankRecord, now: int) -> str:
    """What a rank does, at a time of the monotonic clock."""
    if record.state == RankState.HAS_RAISED:
        return f"has ended by {record.text('last_words')}"
    if record.state == RankState.HAS_LEFT:
        return "has left the program"
    if not record.is_alive:
        return f"has died{_last(record)}"
    stopped = "is stopped, and " if _process_state(int(record.header["pid"])) in STOPPED else ""
    active = record.active
    if len(active):
        call = active[0]
        wait = "" if call["round"] < 0 and call["peer"] < 0 else _awaited(call)
        return f"{stopped}waits {seconds(now - int(call['started']))} in {describe_call(call)} #{call['turn']}{wait}"
    since = int(record.calls[-1]["ended"]) if len(record.calls) else int(record.header["opened"])
    return f"{stopped}is in its own code since {seconds(now - since)}{_last(record)}"


def _awaited(call: Any) -> str:
    where = f", in round {call['round']}" if call["round"] > 0 else ""
    return where + (f", for rank {call['peer']}" if call["peer"] >= 0 else "")


def _last(record: RankRecord) -> str:
    if not len(record.calls):
        return ", before its first call"
    call = record.calls[-1]
    return f", after {describe_call(call)} #{call['turn']}"


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def report(records: Iterable[RankRecord], calls: int, now: int) -> Iterator[str]:
    """Lines on ranks, by job."""
    ordered = sorted(records, key=lambda one: (one.text("job"), one.rank))
    for job, group in groupby(ordered, lambda one: one.text("job")):
        ranks = list(group)
        size = int(ranks[0].header["size"])
        yield f"job {job}: {len(ranks)} of {size} rank{'s' * (size > 1)}, {ranks[0].text('command')}"
        for one in ranks:
            yield f"  rank {one.rank} (pid {one.header['pid']}) {condition(one, now)}"
            for call in one.calls[len(one.calls) - calls :] if calls else ():
                end = CallState(int(call["state"])).name.lower().replace("_", " ")
                took = seconds(int(call["ended"]) - int(call["started"])) if call["ended"] else "under way"
                yield f"      #{call['turn']} {describe_call(call)}: {end}, {took}"


def parse(arguments: Sequence[str] | None = None) -> Any:
    parser = ProgramParser(__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER", help="records that CHORUS_RECORD=FOLDER has kept"
    )
    parser.add_argument(
        "--calls", type=at_least(0, int, 512), default=0, metavar="N", help="show the last N calls of each rank"
    )
    parser.add_argument("--watch", type=at_least(0.1, float), metavar="SECONDS", help="show it again and again")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    while True:
        try:
            found = list(running()) if options.folder is None else in_folder(options.folder)
        except ValueError as error:
            raise SystemExit(f"chorus ps: {error}") from error
        lines = list(report(found, options.calls, time.monotonic_ns()))
        clear = "\x1b[2J\x1b[H" if options.watch else ""
        print(
            clear + "\n".join(lines or ["no ranks: no program of this user here has made a Communicator"]), flush=True
        )
        if options.watch is None:
            return 0 if lines else 1
        time.sleep(options.watch)
