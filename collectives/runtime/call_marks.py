"""Call mark: a checksum in the flags of messages, by which a receiver detects messages of another call."""

from __future__ import annotations

import zlib

from mpi4py import MPI

from collectives.runtime.call import Call
from collectives.selection.timing_table import AlgorithmChoice
from collectives.transport.mailbox import MARKS

PREDEFINED = {
    getattr(MPI, name).handle: name
    for name in (
        *("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"),
        *("MAXLOC", "MINLOC", "REPLACE", "NO_OP"),
    )
}
"""Names of MPI's operations by handle; handles differ between processes."""

_KNOWN_BY_ROOT = ("scatter", "gather", "alltoall")
"""Collectives in whose v-form a rank knows only the lengths of its own blocks."""


def call_mark(call: Call, choice: AlgorithmChoice) -> int:
    """Checksum of the arguments that must be equal on all ranks: 0 <= mark < MARKS."""
    facts: list[object] = [call.collective, call.root, choice.algorithm, choice.segments]
    if call.combine is not None:
        facts += [str(call.unit), PREDEFINED.get(call.op, "user-defined")]
    if not (call.v_form and call.collective in _KNOWN_BY_ROOT):
        facts.append(call.nbytes)
    return zlib.crc32(repr(facts).encode()) % MARKS
