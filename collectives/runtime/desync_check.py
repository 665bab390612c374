"""Do all ranks make the same call? Asked before every collective in debug mode, over messages of its own.

A rank that calls another collective, or the same with another root, count, dtype or operation, would hang or corrupt
the others. Here every rank sends all others a record of its call and the source line it came from, and all raise the
same error if two records do not fit.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.runtime.call import Call
from collectives.errors import InvalidArgument
from collectives.selection.timing_table import Choice

RECORD = 1024
"""Bytes of a record; longer lists of lengths are left out."""

_PACKAGE = os.path.dirname(os.path.abspath(__file__))

_PREDEFINED = {
    getattr(MPI, name).handle: name
    for name in (
        *("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"),
        *("MAXLOC", "MINLOC", "REPLACE", "NO_OP"),
    )
}


def caller() -> str:
    """``file:line in function`` of the innermost frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(os.path.abspath(frame.f_code.co_filename)) == _PACKAGE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def record(form: str, call: Call, choice: Choice, rank: int) -> dict[str, Any]:
    """What must be equal on all ranks, in the order in which it is compared; the rest under other names."""
    facts: dict[str, Any] = {"collective": call.collective, "form": form}
    if call.root or call.collective in ("broadcast", "reduce", "scatter", "gather"):
        facts["root"] = call.root
    if call.combine is not None:
        facts["dtype"] = str(call.unit)
        facts["op"] = _PREDEFINED.get(call.op, f"user-defined, {'' if call.combine.commutative else 'not '}commutative")
    if call.private:
        facts["kind"] = "blocks of any length"
    else:
        facts["bytes"] = call.nbytes
        if len(set(call.lengths)) > 1:
            facts["lengths"] = _brief(call.lengths)
    facts["algorithm"], facts["segments"] = choice
    lengths = list(call.lengths) if call.private else []
    return {"facts": facts, "where": caller(), "rank": rank, "lengths": lengths}


class Checker:
    """Compares calls over a communicator of its own. Making one and `free` are collective."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = MPI.Intracomm.Dup(comm)
        self._rank, self._size = comm.Get_rank(), comm.Get_size()

    def check(self, form: str, call: Call, choice: Choice) -> Callable[[], bool]:
        """Begin to compare; the function that is returned says when all agree, and raises when they do not.

        Raises
        ------
        InvalidArgument
            On every rank, naming two calls that do not fit and their source lines.
        """
        mine = _encode(record(form, call, choice, self._rank))
        everyone = np.empty((self._size, RECORD), np.uint8)
        request = self._comm.Iallgather(mine, everyone)

        def agreed() -> bool:
            if not request.Test():
                return False
            _compare([json.loads(row.tobytes().rstrip(b"\0")) for row in everyone])
            return True

        return agreed

    def free(self) -> None:
        """Free the communicator."""
        self._comm.Free()


def _brief(lengths: tuple[int, ...]) -> list[int] | str:
    """The lengths themselves where they fit a record, else what tells them from most others."""
    if len(lengths) <= 32:
        return list(lengths)
    return f"of {len(lengths)} blocks, checksum {zlib.crc32(repr(lengths).encode()):08x}"


def _encode(facts: dict[str, Any]) -> np.ndarray:
    if len(json.dumps(facts)) > RECORD:
        facts = {**facts, "lengths": []}
    while len(text := json.dumps(facts).encode()) > RECORD and facts["where"]:
        facts["where"] = facts["where"][len(facts["where"]) // 4 + 1 :]
    padded = np.zeros(RECORD, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return padded


def _compare(records: list[dict[str, Any]]) -> None:
    first = records[0]
    for other in records[1:]:
        if other["facts"] != first["facts"]:
            _refuse(first, other, _difference(first["facts"], other["facts"]))
    root = records[first["facts"].get("root", 0)]
    if len(root["lengths"]) == len(records):
        for other in records:
            rank = other["rank"]
            if other["lengths"] and other["lengths"][rank] != root["lengths"][rank]:
                _refuse(root, other, f"bytes for rank {rank}: {root['lengths'][rank]} / {other['lengths'][rank]}")


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    names = [*one, *(name for name in other if name not in one)]
    return "; ".join(
        f"{name}: {one.get(name)} / {other.get(name)}" for name in names if one.get(name) != other.get(name)
    )


def _refuse(one: dict[str, Any], other: dict[str, Any], difference: str) -> None:
    raise InvalidArgument(
        MPI.ERR_ARG,
        f"ranks make different calls: rank {one['rank']} {_tell(one)} at {one['where']}, rank {other['rank']} "
        f"{_tell(other)} at {other['where']}. They differ in {difference}",
    )


def _tell(facts: dict[str, Any]) -> str:
    return "calls " + ", ".join(
        str(value) if name == "collective" else f"{name} {value}" for name, value in facts["facts"].items()
    )
