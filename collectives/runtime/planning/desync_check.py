"""Desynchronisation check: debug mode compares the calls of all ranks before every collective.

Every rank sends all others a record of its call and its source line, or of the error if its arguments are invalid; all
ranks raise the same error if two records differ. Without it, such calls would deadlock or corrupt data.
"""

import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.errors import InvalidArgument
from collectives.runtime.arguments.call import Call
from collectives.runtime.arguments.ops import OP_NAMES
from collectives.runtime.binding.call_binding import check_no_overlap
from collectives.runtime.execution.progress import orphans, progress_until
from collectives.runtime.planning.agreement import gather_or_raise, without_attributes
from collectives.runtime.record.source_line import caller
from collectives.runtime.requests.request import Request
from collectives.selection.timing_table import NATIVE, AlgorithmChoice
from collectives.transport.waits import Others, has_deadline

RECORD = 1024
"""Bytes of a record. Longer lists of lengths are left out, longer texts cut off."""

_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off", ""), False)


def is_wanted(comm: MPI.Intracomm, debug: bool | None, variable: str) -> bool:
    """True if any rank enables debug mode by `debug`, or where that is None by ``CHORUS_DEBUG`` (its value `variable`).

    Collective; raises on all ranks if the variable is invalid on one. Launchers may not pass it on to all machines.
    """
    wanted: bool | InvalidArgument | None = _SWITCH.get(variable.strip().lower()) if debug is None else bool(debug)
    if wanted is None:
        message = f"CHORUS_DEBUG: expected 1, true, yes or on, or 0, false, no, off or nothing, found {variable!r}"
        wanted = InvalidArgument(MPI.ERR_ARG, message)
    return any(gather_or_raise(comm, wanted))


def others(collective: str) -> Others:
    """Other ranks whose records of a call are awaited."""
    return Others(collective, "for other ranks to make a call (debug mode)")


def record(form: str, call: Call, choice: AlgorithmChoice, rank: int) -> dict[str, Any]:
    """Record of a call for the comparison: `facts` to be equal on all ranks, source line, rank, and block lengths."""
    facts: dict[str, Any] = {"collective": call.collective, "form": form}
    if call.root or call.collective in ("broadcast", "reduce", "scatter", "gather"):
        facts["root"] = call.root
    if call.combine is not None:
        facts["dtype"] = str(call.unit)
        facts["op"] = OP_NAMES.get(call.op, f"user-defined, {'' if call.combine.commutative else 'not '}commutative")
    if call.local_counts:
        facts["kind"] = "blocks of any length"
    else:
        facts["bytes"] = call.nbytes
        if len(set(call.lengths)) > 1:
            checksum = f"of {len(call.lengths)} blocks, checksum {zlib.crc32(repr(call.lengths).encode()):08x}"
            facts["lengths"] = list(call.lengths) if len(call.lengths) <= 32 else checksum  # to fit a record
    facts["algorithm"], facts["segments"] = choice
    if choice.algorithm == NATIVE and form == "blocking":  # the MPI's collectives of other forms do not match
        facts["timeout"] = "given" if has_deadline() else "none"
    lengths = list(call.lengths) if call.local_counts and call.neighbors is None else []
    return {"facts": facts, "where": caller(), "rank": rank, "lengths": lengths}


class DesyncChecker:
    """Compares the calls of all ranks, over a communicator of its own. Creation and `free` are collective.

    Attributes
    ----------
    reported : the other ranks know the current call of this rank, so that none waits for its record
    is_left : a wait for records has ended without them, so that further ones may never come
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = without_attributes(comm)
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._native: Request | None = None  # the last non-blocking one
        self._refusals: list[Callable[[], bool]] = []
        self._exchanges: list[tuple[MPI.Request, np.ndarray, np.ndarray]] = []
        self.reported = self.is_left = False

    def check(self, form: str, call: Call, choice: AlgorithmChoice, last: bool = True) -> Callable[[], bool]:
        """Start comparing this call with other ranks' calls. Returns a test that is True once all agree.

        It raises on every rank, naming two calls that differ and their source lines, or a rank with invalid arguments.
        `last`: no other comparison precedes the call. Raises at once, with nothing sent, if the call's buffers overlap.
        """
        check_no_overlap(call)  # once the call is sent, no error of this rank alone may follow: others would hang
        arrived, records = self._send(record(form, call, choice, self._rank))
        self.reported = last

        def agreed() -> bool:
            if not arrived():
                return False
            reported, self.reported = self.reported, True
            _compare([json.loads(row.tobytes().rstrip(b"\0")) for row in records])
            self.reported = reported
            return True

        return agreed

    def in_order(self, call: Request, gate: Callable[[], bool] | None) -> Callable[[], bool]:
        """Gate of a native non-blocking call: opens once those before have begun and `gate`, if any, is open.

        The MPI matches the collectives of a communicator by their order.
        """
        before, self._native = self._native, call
        return lambda: (before is None or before.has_begun()) and (gate is None or gate())

    def start_native(self) -> None:
        """Wait until native non-blocking calls have begun, since another collective on their communicator follows."""
        if self._native is not None:
            progress_until(self._native.has_begun, self._native)

    def refuse(self, form: str, collective: str, error: Exception) -> Callable[[], bool]:
        """Send `error` to all ranks as this one's record. Returns a test that is True once all have sent one."""
        error_class = error.Get_error_class() if isinstance(error, MPI.Exception) else MPI.ERR_ARG
        text = f"{type(error).__name__}: {error}"
        facts = {"facts": {"collective": collective, "form": form}, "where": caller(), "rank": self._rank}
        arrived, _ = self._send({**facts, "lengths": [], "refused": [error_class, text]})
        self.reported = True
        self._refusals = [delivered for delivered in self._refusals if not delivered()]
        self._refusals.append(arrived)
        return arrived

    def _send(self, facts: dict[str, Any]) -> tuple[Callable[[], bool], np.ndarray]:
        mine, records = _encode(facts), np.empty((self._size, RECORD), np.uint8)
        request = self._comm.Iallgather(mine, records)
        self._exchanges = [*self._under_way(), (request, mine, records)]
        return request.Test, records

    def _under_way(self) -> list[tuple[MPI.Request, np.ndarray, np.ndarray]]:
        return [one for one in self._exchanges if not one[0].Test()]

    def free(self) -> None:
        """Free the communicator once all refusals are delivered. It stays if records may still arrive."""
        if not self.is_left:
            progress_until(lambda: all([delivered() for delivered in self._refusals]))
        left = self._under_way()
        orphans.extend(left)
        if not left:
            self._comm.Free()


def _encode(facts: dict[str, Any]) -> np.ndarray:
    facts, most = dict(facts), RECORD
    if len(json.dumps(facts)) > RECORD:
        facts["lengths"] = []
    while len(text := json.dumps(facts).encode()) > RECORD and most > 1:  # up to 12 bytes for a character
        most = most * 3 // 4
        facts["where"] = facts["where"][-most:]
        if "refused" in facts:
            error_class, error = facts["refused"]
            facts["refused"] = [error_class, error[:most]]
    padded = np.zeros(RECORD, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return padded


def _compare(records: list[dict[str, Any]]) -> None:
    for other in records:
        if "refused" in other:  # before a comparison: it lacks most facts
            error_class, text = other["refused"]
            raise InvalidArgument(
                error_class,
                f"rank {other['rank']} {_describe(other)} at {other['where']} and refuses its arguments: {text}",
            )
    first = records[0]
    for other in records[1:]:
        mine, theirs = first["facts"], other["facts"]
        if mine != theirs:
            names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
            _refuse(first, other, "; ".join(f"{name}: {mine.get(name)} / {theirs.get(name)}" for name in names))
    root = records[first["facts"].get("root", 0)]
    if len(root["lengths"]) == len(records):
        for other in records:
            rank = other["rank"]
            if other["lengths"] and other["lengths"][rank] != root["lengths"][rank]:
                _refuse(root, other, f"bytes for rank {rank}: {root['lengths'][rank]} / {other['lengths'][rank]}")


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
