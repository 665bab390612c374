"""Desynchronisation check: debug mode compares the calls of all ranks before every collective.

A rank that calls another collective, or the same with another root, count, dtype or operation, would hang or corrupt
the others. Here every rank sends all others a record of its call and the source line it came from, and all raise the
same error if two records do not fit. A rank that refuses its arguments sends that in place of a record.
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

from collectives.errors import InvalidArgument
from collectives.runtime.call import Call
from collectives.runtime.call_marks import PREDEFINED
from collectives.selection.timing_table import AlgorithmChoice
from collectives.transport.wire import pause

RECORD = 1024
"""Bytes of a record; longer lists of lengths are left out."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off", ""), False)


def is_wanted(comm: MPI.Intracomm, debug: bool | None, variable: str) -> bool:
    """Agree on debug mode: all ranks check calls if one of them wants to. Collective, and so are its errors.

    Parameters
    ----------
    comm : MPI.Intracomm
    debug : bool or None
        What the user asks for; None leaves it to `variable`.
    variable : str
        Value of ``CHORUS_DEBUG``, empty where it is not set. Launchers need not pass it on to all machines.

    Raises
    ------
    InvalidArgument
        If a variable that decides is neither on nor off.
    """
    wanted = _SWITCH.get(variable.strip().lower()) if debug is None else bool(debug)
    everyone = comm.allgather(variable if wanted is None else wanted)
    for rank, other in enumerate(everyone):
        if isinstance(other, str):
            message = f"CHORUS_DEBUG: expected 1, true, yes or on, or 0, false, no, off or nothing, found {other!r}"
            raise InvalidArgument(MPI.ERR_ARG, f"{message} on rank {rank}")
    return any(everyone)


def caller() -> str:
    """``file:line in function`` of the innermost frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def record(form: str, call: Call, choice: AlgorithmChoice, rank: int) -> dict[str, Any]:
    """Record of a call: `facts` must be equal on all ranks, the rest is for the message."""
    facts: dict[str, Any] = {"collective": call.collective, "form": form}
    if call.root or call.collective in ("broadcast", "reduce", "scatter", "gather"):
        facts["root"] = call.root
    if call.combine is not None:
        facts["dtype"] = str(call.unit)
        facts["op"] = PREDEFINED.get(call.op, f"user-defined, {'' if call.combine.commutative else 'not '}commutative")
    if call.local_counts:
        facts["kind"] = "blocks of any length"
    else:
        facts["bytes"] = call.nbytes
        if len(set(call.lengths)) > 1:
            facts["lengths"] = _brief(call.lengths)
    facts["algorithm"], facts["segments"] = choice
    lengths = list(call.lengths) if call.local_counts else []
    return {"facts": facts, "where": caller(), "rank": rank, "lengths": lengths}


class DesyncChecker:
    """Compares calls over a communicator of its own. Making one and `free` are collective.

    Attributes
    ----------
    heard : bool
        Whether the other ranks know of the call that this rank makes now, so that none waits for its record.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = MPI.Intracomm.Dup(comm)
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._refusals: list[Callable[[], bool]] = []
        self.reported = False

    def check(self, form: str, call: Call, choice: AlgorithmChoice, last: bool = True) -> Callable[[], bool]:
        """Start the comparison; the returned test is True when all ranks agree, and raises if they differ.

        Parameters
        ----------
        form, call, choice
            The call of this rank.
        last : bool
            Whether nothing else is compared before the call begins.

        Raises
        ------
        InvalidArgument
            On every rank, naming two calls that do not fit and their source lines, or a rank that refuses its call.
        """
        arrived, everyone = self._send(record(form, call, choice, self._rank))
        self.reported = last

        def agreed() -> bool:
            if not arrived():
                return False
            reported, self.reported = self.reported, True
            _compare([json.loads(row.tobytes().rstrip(b"\0")) for row in everyone])
            self.reported = reported
            return True

        return agreed

    def refuse(self, form: str, collective: str, error: Exception) -> Callable[[], bool]:
        """Report to all ranks that this one raises; the returned test is True once all have received it."""
        facts = {"collective": collective, "form": form}
        refused = [error.Get_error_class() if isinstance(error, MPI.Exception) else MPI.ERR_ARG, _error_text(error)]
        arrived, _ = self._send(
            {"facts": facts, "where": caller(), "rank": self._rank, "lengths": [], "refused": refused}
        )
        self.reported = True
        self._refusals = [delivered for delivered in self._refusals if not delivered()]
        self._refusals.append(arrived)
        return arrived

    def _send(self, facts: dict[str, Any]) -> tuple[Callable[[], bool], np.ndarray]:
        """Start the exchange of records; returns its completion test and the receive buffer."""
        mine, everyone = _encode(facts), np.empty((self._size, RECORD), np.uint8)
        return self._comm.Iallgather(mine, everyone).Test, everyone

    def free(self) -> None:
        """Free the communicator, once all refusals are known."""
        while not all([delivered() for delivered in self._refusals]):
            pause()
        self._comm.Free()


def _brief(lengths: tuple[int, ...]) -> list[int] | str:
    """Lengths if they fit a record, else a checksum."""
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


def _error_text(error: Exception) -> str:
    """The type and the message of an error, as far as a record holds them."""
    return f"{type(error).__name__}: {error}"[: RECORD // 2]


def _compare(records: list[dict[str, Any]]) -> None:
    for other in records:
        if "refused" in other:
            error_class, text = other["refused"]
            raise InvalidArgument(
                error_class,
                f"rank {other['rank']} {_describe(other)} at {other['where']} and refuses its arguments: {text}",
            )
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
        f"ranks make different calls: rank {one['rank']} {_describe(one)} at {one['where']}, rank {other['rank']} "
        f"{_describe(other)} at {other['where']}. They differ in {difference}",
    )


def _describe(facts: dict[str, Any]) -> str:
    return "calls " + ", ".join(
        str(value) if name == "collective" else f"{name} {value}" for name, value in facts["facts"].items()
    )
