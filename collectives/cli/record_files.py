"""Files of records for other programs: dumps of PyTorch's flight recorder, and a trace for Perfetto."""

import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from collectives.benchmark import traces
from collectives.engine.instructions import CallState
from collectives.runtime.record.causes import place
from collectives.runtime.record.conditions import describe_call
from collectives.runtime.record.layout import OUTSIDE
from collectives.runtime.record.reader import RankRecord, is_active

VERSION = "2.10"
"""Version of the format of the flight recorder's dumps, and of their names ``rank_0``, ``rank_1``, and so on."""

NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "scan": "all_reduce",
    "exscan": "all_reduce",
}
"""Names of collectives in PyTorch, where they differ; prefix sums, which it lacks, are sums there."""

DIVIDED_INPUT, DIVIDED_OUTPUT = ("allgather", "gather"), ("reduce_scatter", "scatter")
"""Collectives of which a rank sends, or receives, a p-th part of the bytes."""


def flight_recorder(records: Iterable[RankRecord], folder: Path) -> None:
    """Write a file for each rank that ``torch.distributed.flight_recorder.fr_trace`` reads.

    A process group there is a channel of a communicator here, as calls are numbered by channel. Its members are the
    ranks that have made calls on it, or are waited for in one.
    """
    ranks = [(record, record.calls[record.calls["channel"] != OUTSIDE]) for record in records]
    members = defaultdict[tuple[int, int], set[int]](set)
    for record, calls in ranks:
        for call in calls:
            members[place(call)[:2]] |= {record.rank} | ({int(call["peer"])} if call["peer"] >= 0 else set())
    for record, calls in ranks:
        groups = {_group(key): _config(key, found) for key, found in members.items() if record.rank in found}
        entries = [_entry(record, call, len(members[place(call)[:2]])) for call in calls]
        dump = {"version": VERSION, "pg_config": groups, "entries": entries}
        (folder / f"rank_{record.rank}").write_bytes(pickle.dumps(dump))


def _group(key: tuple[int, int]) -> str:
    return f"{key[0]}.{key[1]}"


def _config(key: tuple[int, int], ranks: set[int]) -> dict[str, str]:
    return {"name": _group(key), "desc": "undefined", "ranks": str(sorted(ranks))}


def _entry(record: RankRecord, call: Any, size: int) -> dict[str, Any]:
    name, (communicator, channel, turn) = call["collective"].decode(), place(call)
    nbytes, offset, dtype = int(call["nbytes"]), int(record.header["wall_offset"]), call["dtype"].decode() or "Byte"
    kind = NAMES.get(name, name)
    return {
        "record_id": int(call["number"]),
        "pg_id": channel,
        "process_group": (_group((communicator, channel)), "undefined"),
        "collective_seq_id": turn,
        "p2p_seq_id": 0,
        "op_id": turn,
        "profiling_name": f"gloo:{kind}" + (f" root={call['root']}" if call["root"] >= 0 else ""),
        "input_sizes": [[nbytes // size if name in DIVIDED_INPUT else nbytes]],
        "output_sizes": [[nbytes // size if name in DIVIDED_OUTPUT else nbytes]],
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
        "state": "completed" if call["state"] == CallState.HAS_ENDED else "started",
        "time_created_ns": int(call["started"]) + offset,
        "time_discovered_started_ns": int(call["started"]) + offset,
        "time_discovered_completed_ns": int(call["ended"]) + offset if call["ended"] else None,
        "retired": bool(call["ended"]),
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": _frames(record) if is_active(call) else [],
    }


def _frames(record: RankRecord) -> list[dict[str, Any]]:
    """Line that a rank is at, as a stack of one frame."""
    where, _, rest = record.text("line").partition(" in ")
    path, _, line = where.rpartition(":")
    return [{"name": rest.partition(":")[0], "filename": path, "line": int(line)}] if line.isdecimal() else []


def trace(records: Sequence[RankRecord], path: Path, now: int) -> None:
    """Write the calls of all ranks as a trace that ui.perfetto.dev opens; those under way end at `now`."""
    traces.write(path, _spans(records, now), ranks=str(len(records)))


def _spans(records: Sequence[RankRecord], now: int) -> Iterator[traces.Entry]:
    ranks = [(record, record.calls) for record in records]
    yield from traces.names([0] * (1 + max((record.rank for record in records), default=0)))
    begin = min((int(calls["started"].min()) for _, calls in ranks if len(calls)), default=0)
    for record, calls in ranks:
        for call in calls:
            times = 1e-9 * (int(call["started"]) - begin), 1e-9 * (int(call["ended"] or now) - begin)
            state = CallState(call["state"]).name.lower()
            name = call["collective"].decode()
            yield traces.span(record.rank, 0, name, state, *times, call=describe_call(call))
