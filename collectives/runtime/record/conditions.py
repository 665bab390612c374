"""Text on what ranks do, from their records."""

from pathlib import Path
from typing import Any

from collectives.runtime.record.layout import OUTSIDE, RankState
from collectives.runtime.record.reader import ProcessState, RankRecord, is_active
from collectives.units import format_bytes, format_time

COUNT_MASK = (1 << 24) - 1
"""Bits of the number of a communicator that count those of its first rank, see `Transports`."""

BLOCKING = 0
"""`form` of blocking calls."""

STOPPED = "Tt"
"""States of a process in /proc that SIGSTOP, or a debugger, has stopped."""


def describe_call(call: Any) -> str:
    """Collective, algorithm and data of a call."""
    if call["channel"] == OUTSIDE:
        return f"{call['collective'].decode()} ({call['algorithm'].decode()})"
    root = "" if call["root"] < 0 else f" with root {call['root']}"
    kinds = [text.decode() for text in (call["dtype"], call["op"]) if text]
    data = ", ".join([format_bytes(call["nbytes"]), *[" ".join(kinds)] * bool(kinds)])
    return f"{call['collective'].decode()}{root} ({call['algorithm'].decode()}, {data}) #{call['turn']}"


def condition(record: RankRecord, now: int) -> str:
    """Text on a rank: the call that it waits in, or where else it is, at a time of the monotonic clock."""
    calls, words = record.calls, record.text("last_words")
    if record.state == RankState.HAS_RAISED:
        return f"has ended by {words}{after(record)}"
    failed = f"; an exception before: {words}" if words else ""
    if record.state == RankState.HAS_LEFT:
        return f"has left the program{after(record)}{failed}"
    if not record.is_alive:
        ended = "has died" if record.process is None else "has ended"
        return f"{ended}{after(record)}{failed}"
    stopped = "is stopped, and " if is_stopped(record) else ""
    if record.process == ProcessState.IS_SILENT:
        return f"does not answer: it is stopped, or its node cannot be reached{after(record)}{failed}"
    waiting = [call for call in calls if is_active(call) and is_waited_for(call)]
    if waiting:
        since = waiting[0]["started"]
        text = f"waits {format_time(1e-9 * (now - since))} in {_awaited(waiting[0])}"
    else:
        since = (calls[-1]["ended"] or calls[-1]["started"]) if len(calls) else record.header["opened"]
        text = f"is in its own code since {format_time(1e-9 * (now - since))}{after(record)}"
    return f"{stopped}{text}{line_since(record, since)}{failed}"


def is_waited_for(call: Any) -> bool:
    """True if a rank waits in a call, not ended yet. A non-blocking one then has a peer, unless it is the MPI's."""
    return bool(call["form"] == BLOCKING or call["peer"] >= 0 or call["algorithm"].startswith(b"native"))


def line_since(record: RankRecord, since: int) -> str:
    """Line that a rank is at. Empty if the last one was seen before a time: it is of earlier code."""
    return f", at {record.text('line')}" if record.header["line_seen"] > since else ""


def _awaited(call: Any) -> str:
    text = describe_call(call)
    text += f" of communicator {call['communicator'] & COUNT_MASK}" if call["channel"] != OUTSIDE else ""
    text += f", in round {call['round']}" if call["round"] > 0 else ""
    return text + (f", for rank {call['peer']}" if call["peer"] >= 0 else "")


def after(record: RankRecord) -> str:
    """Text on the last call of a rank, after a comma. Empty if it is not kept."""
    if len(calls := record.calls):
        return f", after {describe_call(calls[-1])}"
    return "" if record.header["last"] else ", before its first call"


def is_stopped(record: RankRecord) -> bool:
    """True if a signal or a debugger has stopped the process."""
    if record.process is not None:
        return record.process == ProcessState.STOPPED
    try:
        return Path(f"/proc/{record.header['pid']}/stat").read_text().rpartition(")")[2].split()[0] in STOPPED
    except (OSError, IndexError):
        return False
