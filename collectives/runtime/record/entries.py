"""Entries of calls in the record, which the engine copies when a call starts."""

import numpy as np
from mpi4py import MPI

from collectives.engine.instructions import CALL_RECORD
from collectives.runtime.arguments.call import Call
from collectives.runtime.arguments.ops import OP_NAMES
from collectives.schedule.semantics import MEANINGS
from collectives.selection.timing_table import AlgorithmChoice, Form

NO_CHANNEL = -1
"""`channel` of calls without mailboxes."""

FORMS: tuple[Form, ...] = ("blocking", "nonblocking", "persistent")
"""Forms of calls, by their number in an entry."""


def call_entry(call: Call, choice: AlgorithmChoice, form: Form, channel: int, communicator: int) -> np.ndarray:
    """Entry of a call's program: an array of shape (1,) of the dtype `CALL_RECORD`."""
    entry = np.zeros(1, CALL_RECORD)
    meaning = MEANINGS.get(call.collective)
    root = call.root if meaning is not None and meaning.rooted else -1
    reduces = call.combine is not None
    entry["nbytes"], entry["communicator"], entry["channel"], entry["root"] = call.nbytes, communicator, channel, root
    entry["round"] = entry["peer"] = -1
    entry["form"], entry["collective"], entry["algorithm"] = FORMS.index(form), call.collective, str(choice)
    entry["dtype"] = call.unit.name if reduces else ""
    entry["op"] = OP_NAMES.get((call.operation or MPI.SUM).handle, "user") if reduces else ""
    return entry
