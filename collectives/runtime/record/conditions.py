"""Text on what ranks do, from their records."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from collectives.engine.instructions import CallState
from collectives.runtime.record.layout import RankState
from collectives.runtime.record.reader import RankRecord

STOPPED = "Tt"
"""States of a process in /proc that SIGSTOP, or a debugger, has stopped."""


def describe_call(call: Any) -> str:
    """Collective, algorithm and data of a call."""
    root = "" if call["root"] < 0 else f" with root {call['root']}"
    kinds = [text.decode() for text in (call["dtype"], call["op"]) if text]
    data = ", ".join([size(call["nbytes"]), *[" ".join(kinds)] * bool(kinds)])
    return f"{call['collective'].decode()}{root} ({call['algorithm'].decode()}, {data})"


def size(nbytes: int) -> str:
    """Bytes in a unit that suits them."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"


def seconds(nanoseconds: int) -> str:
    """Duration in a unit that suits it."""
    for unit, factor in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= factor:
            return f"{nanoseconds / factor:.3g} {unit}"
    return f"{nanoseconds} ns"


def condition(record: RankRecord, now: int) -> str:
    """Text on a rank: the call that it waits in, or where else it is, at a time of the monotonic clock."""
    if record.state == RankState.HAS_RAISED:
        return f"has ended by {record.text('last_words')}"
    if record.state == RankState.HAS_LEFT:
        return "has left the program"
    if not record.is_alive:
        return f"has died{_last(record)}"
    stopped = "is stopped, and " if _process_state(record.header["pid"]) in STOPPED else ""
    active = record.active
    if len(active):
        call = active[0]
        wait = "" if call["round"] < 0 and call["peer"] < 0 else _awaited(call)
        return f"{stopped}waits {seconds(now - call['started'])} in {describe_call(call)} #{call['turn']}{wait}"
    since = record.calls[-1]["ended"] if len(record.calls) else record.header["opened"]
    line = f", at {record.text('line')}" if record.header["line_seen"] > since else ""
    return f"{stopped}is in its own code since {seconds(now - since)}{_last(record)}{line}"


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
        size = ranks[0].header["size"].item()
        yield f"job {job}: {len(ranks)} of {size} rank{'s' * (size > 1)}, {ranks[0].text('command')}"
        for one in ranks:
            yield f"  rank {one.rank} (pid {one.header['pid']}) {condition(one, now)}"
            for call in one.calls[len(one.calls) - calls :] if calls else ():
                end = CallState(call["state"]).name.lower().replace("_", " ")
                took = seconds(call["ended"] - call["started"]) if call["ended"] else "under way"
                yield f"      #{call['turn']} {describe_call(call)}: {end}, {took}"
