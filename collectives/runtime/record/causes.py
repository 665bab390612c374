"""Causes of waits, derived from the records of ranks, and reports on all of them.

All ranks of a communicator make the same calls in the same order on each of its channels, and number them. A rank is
waited for if it has not made a call that another rank is in. If it waits itself, the search goes on from its call.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np

from collectives.engine.instructions import CallState
from collectives.runtime.record.conditions import condition, describe_call, is_stopped, is_waited_for, line_since
from collectives.runtime.record.layout import RankState
from collectives.runtime.record.reader import ProcessState, RankRecord, is_active
from collectives.units import format_time

COMPARED = 32
"""Last calls of each rank that are compared with those of others."""

SLOW = 0.1e9
"""Nanoseconds by which a slow rank comes last to most of its calls."""

FEW, MOST = 5, 0.8
"""Calls, and the share of them, to which it comes last."""

PERSISTENT = 2
"""`form` of persistent calls: without mailboxes, ranks may start them in any order."""

OF_OWN_LENGTH = (b"gather", b"scatter", b"allgather", b"alltoall")
"""Collectives whose bytes may differ between ranks."""

Place = tuple[int, int, int]
"""Communicator, channel and number of a call: equal on all ranks."""


def place(call: Any) -> Place:
    """Place of a call."""
    communicator, channel, turn = (int(call[name]) for name in ("communicator", "channel", "turn"))
    return communicator, channel, turn


def facts(call: Any) -> tuple[Any, ...]:
    """Properties of a call that are equal on all ranks."""
    nbytes = None if call["collective"] in OF_OWN_LENGTH else call["nbytes"]
    return *(call[name] for name in ("collective", "root", "dtype", "op", "algorithm")), nbytes


class Calls(NamedTuple):
    """Kept calls of one rank, and those that it has not ended."""

    record: RankRecord
    calls: np.ndarray
    active: list[Any]

    def has_made(self, call: Any) -> bool | None:
        """True if this rank has made a call of another rank too. None if it has made none on its channel."""
        same = self.calls[
            (self.calls["communicator"] == call["communicator"]) & (self.calls["channel"] == call["channel"])
        ]
        return bool(same["turn"].max() >= call["turn"]) if len(same) else None

    @property
    def is_waiting(self) -> bool:
        """True if the rank waits in a call: it may have started others, and be in its own code."""
        return any(map(is_waited_for, self.active))

    def has_moved(self, since: int) -> bool:
        """True if the rank has begun or ended a call after a time, or goes on in its own code.

        It stands still there if two looks in succession have found the same stack.
        """
        record, times = self.record, [*self.calls["started"], *self.calls["ended"], 0]
        stands = record.header["line_looks"] > 1 and record.header["line_seen"] > max(times)
        goes_on = not self.is_waiting and (not stands or record.header["line_moved"] > since)
        return max(times) > since or (goes_on and self.is_well and record.process != ProcessState.IS_SILENT)

    @property
    def is_well(self) -> bool:
        """True unless the rank has ended, or is stopped."""
        record = self.record
        return record.state == RankState.RUNS and record.is_alive and not is_stopped(record)


def calls_of(record: RankRecord) -> Calls:
    """Calls in a record."""
    calls = record.calls
    return Calls(record, calls, [call for call in calls if is_active(call)])


def different_calls(ranks: Sequence[Calls]) -> str:
    """Text on the first of the last calls that differ between ranks. Empty if there is none."""
    found: defaultdict[Place, dict[tuple[Any, ...], tuple[int, Any]]] = defaultdict(dict)
    for one in ranks:
        for call in one.calls[-COMPARED:]:
            if call["form"] != PERSISTENT or call["channel"] >= 0:  # their order may differ without an error
                found[place(call)].setdefault(facts(call), (one.record.rank, call))
    differing = [tuple(made.values()) for made in found.values() if len(made) > 1]
    if not differing:
        return ""
    made = min(differing, key=lambda several: min(call["started"] for _, call in several))
    texts = [f"rank {rank} {describe_call(call)}" for rank, call in made]
    return f"ranks make different calls: {', '.join(texts)}"


def unmatched_call(ranks: Sequence[Calls], member: int, communicator: int) -> tuple[int, str]:
    """Rank, and text on its last call, that another rank of the communicator has not made. -1 and "" if none is.

    A `member` of a `communicator` counts there without a call, too.
    """
    last: defaultdict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
    for one in ranks:
        for call in one.calls[-COMPARED:]:
            last[place(call)[:2]][one.record.rank] = call
    for (number, _), made in last.items():
        turns = {member: 0} if number == communicator else {}
        turns |= {rank: call["turn"] for rank, call in made.items()}
        ahead, behind = (choose(turns, key=turns.__getitem__) for choose in (max, min))
        if turns[ahead] > turns[behind]:
            return ahead, f"rank {ahead} has made {describe_call(made[ahead])}, and rank {behind} has not"
    return -1, ""


def slowness(rank: int, ranks: Sequence[Calls]) -> str:
    """Text on a rank that came last to most of the last calls; empty for others."""
    starts: defaultdict[Place, dict[int, int]] = defaultdict(dict)
    for one in ranks:
        for call in one.calls[-COMPARED:]:
            starts[place(call)][one.record.rank] = int(call["started"])
    late = [made[rank] - max(others) for made in starts.values() if (others := _others(made, rank))]
    last = sorted(time for time in late if time > 0)
    if len(late) < FEW or len(last) < MOST * len(late) or last[len(last) // 2] < SLOW:  # median: not one long delay
        return ""
    return (
        f", is slow (it came last to {len(last)} of {len(late)} calls, by {format_time(1e-9 * last[len(last) // 2])})"
    )


def _others(made: Mapping[int, int], rank: int) -> list[int]:
    """Starts of a call on other ranks, if this one has made it too."""
    return [start for other, start in made.items() if other != rank] if rank in made else []


def _waits(waiting: Sequence[tuple[Calls, Any]]) -> str:
    """Text on ranks that wait for another one, by their calls: the first call, and its line if one has noted that."""
    ranks = sorted({one.record.rank for one, _ in waiting})
    same = [(one, call) for one, call in waiting if place(call) == place(waiting[0][1])]
    at = next(filter(None, (line_since(one.record, call["started"]) for one, call in same)), "")
    who = f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))} wait{'s'[len(ranks) > 1 :]}"
    return f"{who} for it in {describe_call(same[0][1])}{at}"


def _missing(ranks: Sequence[Calls]) -> dict[int, list[tuple[Calls, Any]]]:
    """Ranks that have not made a call that others are in: those others, and the call."""
    missing: dict[int, list[tuple[Calls, Any]]] = defaultdict(list)
    waiting = [(one, call) for one in ranks for call in one.active]
    for (one, call), other in product(waiting, ranks):
        made = other.has_made(call)
        # without calls on the channel it may be no member of the communicator, unless it is the peer
        if made is False or (made is None and other.record.rank == call["peer"]):
            missing[other.record.rank].append((one, call))
    return missing


def are_at_work(records: Iterable[RankRecord], since: int) -> bool:
    """True if ranks that wait since before a time wait only for others that have moved after it.

    Those have begun or ended a call, or have gone from line to line of their own code.
    """
    ranks = list(map(calls_of, records))
    waiting = [(one, call) for one in ranks for call in one.active if call["started"] <= since and is_waited_for(call)]
    long = {one.record.rank for one, _ in waiting}
    awaited = set(_missing(ranks)).union(int(call["peer"]) for _, call in waiting) - long
    moved = [one.has_moved(since) for one in ranks if one.record.rank in awaited]
    return bool(moved) and all(moved) and not different_calls(ranks)


def causes(records: Iterable[RankRecord], now: int) -> list[str]:
    """Sentences on why ranks wait, at a time of the monotonic clock. Empty if no rank waits.

    After an exception on a rank also the first calls that differ: messages of another call may have caused it.
    """
    ranks = sorted(map(calls_of, records), key=lambda one: one.record.rank)
    waiting = [(one, call) for one in ranks for call in one.active]
    if not waiting:
        differing = different_calls(ranks) if any(one.record.text("last_words") for one in ranks) else ""
        return [differing] * bool(differing)
    missing = _missing(ranks)
    found = [text] if (text := different_calls(ranks)) else []
    by_rank = {one.record.rank: one for one in ranks}
    free = [rank for rank in missing if not (by_rank[rank].is_waiting and by_rank[rank].is_well)]
    for rank in free:
        text = f"{condition(by_rank[rank].record, now)}{slowness(rank, ranks) if by_rank[rank].is_well else ''}"
        found.append(f"rank {rank} {text}; {_waits(missing[rank])}")
    if missing and not free:
        texts = [f"rank {rank} {condition(by_rank[rank].record, now)}" for rank in missing]
        found.append(f"ranks wait for each other in different calls: {'; '.join(texts)}")
    return found or [*_without_record(waiting, by_rank), *_in_the_call(ranks, waiting, now)]


def _without_record(waiting: Sequence[tuple[Calls, Any]], known: Mapping[int, Calls]) -> Iterator[str]:
    """Ranks that are waited for, and of which nothing is known here."""
    size = int(waiting[0][0].record.header["size"])
    for rank in sorted({int(call["peer"]) for _, call in waiting if 0 <= call["peer"] < size} - set(known)):
        yield f"rank {rank} has no record on this node"


def _in_the_call(ranks: Sequence[Calls], waiting: Sequence[tuple[Calls, Any]], now: int) -> Iterator[str]:
    """Ranks that have made the calls of the waiting ones, and do not go on in them."""
    places = {place(call) for _, call in waiting}
    gone = [one for one in ranks if not one.is_well]
    stuck = {one.record.rank for one in [one for one in gone if not _has_ended(one, places)] or gone}
    for one in sorted(ranks, key=lambda one: bool(one.active)):  # waiting ones may have been ended with the others
        if one.record.rank in stuck:
            yield f"rank {one.record.rank} {condition(one.record, now)}"
        for call in one.calls[-COMPARED:]:
            if call["state"] in (CallState.WAS_LEFT, CallState.HAS_FAILED) and place(call) in places:
                yield f"rank {one.record.rank} has left {describe_call(call)} before its end"


def _has_ended(one: Calls, places: set[Place]) -> bool:
    """True if a rank has left the program, and ended its calls at these places before."""
    made = [call["state"] == CallState.HAS_ENDED for call in one.calls if place(call) in places]
    return one.record.state == RankState.HAS_LEFT and bool(made) and all(made)


def report(records: Iterable[RankRecord], calls: int, now: int) -> Iterator[str]:
    """Lines on ranks, with their last calls, by job."""
    ordered = sorted(records, key=lambda one: (one.text("job"), one.rank))
    for job, group in groupby(ordered, lambda one: one.text("job")):
        ranks = list(group)
        size = ranks[0].header["size"].item()
        yield f"job {job}: {len(ranks)} of {size} rank{'s' * (size > 1)}, {ranks[0].text('command')}"
        for one in ranks:
            yield f"  rank {one.rank} (pid {one.header['pid']}) {condition(one, now)}"
            for call in one.calls[-calls:] if calls else ():
                end = CallState(call["state"]).name.lower().replace("_", " ")
                took = format_time(1e-9 * (call["ended"] - call["started"])) if call["ended"] else "under way"
                yield f"      {describe_call(call)}: {end}, {took}"
        yield from (f"  cause: {text}" for text in causes(ranks, now))
