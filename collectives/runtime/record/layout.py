"""Memory of a record: a header of one page, then a ring of `CALLS_KEPT` entries of the dtype `CALL_RECORD`."""

from enum import IntEnum

import numpy as np

from collectives.engine.instructions import CALL_RECORD, CALLS_KEPT

MAGIC, VERSION = b"chorus record", 1

NAME = "chorus-record"
"""Name of the memory files of records, and suffix of their files."""


OUTSIDE = -2
"""`channel` of waits outside of collectives: meetings of all ranks, and messages. Each rank numbers the latter."""


class RankState(IntEnum):
    """State of a rank: whether it may still make calls."""

    RUNS = 0
    HAS_LEFT = 1  # an orderly exit
    HAS_RAISED = 2  # an uncaught exception ends it


_FIELDS = [
    ("magic", "S16"),
    ("version", "i4"),
    ("calls_kept", "i4"),  # entries of the ring
    ("state", "i4"),  # a `RankState`
    ("rank", "i4"),  # in MPI.COMM_WORLD
    ("size", "i4"),  # of MPI.COMM_WORLD
    ("unused", "i4"),  # padding
    ("pid", "i8"),  # process number
    ("wall_offset", "i8"),  # nanoseconds since 1970 less those of the monotonic clock
    ("opened", "i8"),  # nanoseconds of the monotonic clock
    ("last", "i8"),  # number of the last call
    ("job", "S64"),  # the same for all ranks of a launch on a node
    ("host", "S64"),
    ("command", "S512"),
    ("last_words", "S1024"),  # of an exception that has ended the rank, or one of its threads
    ("line", "S512"),  # that the program has been at for long: file, number, function, and its text
    ("line_seen", "i8"),  # nanoseconds of the monotonic clock when it was
    ("line_moved", "i8"),  # the same, when it had gone on since the look before, between the same two calls, or 0
    ("line_looks", "i8"),  # successive looks at which it was at this line, by the same stack, between the same calls
]

HEADER = np.dtype({"names": [name for name, _ in _FIELDS], "formats": [kind for _, kind in _FIELDS], "itemsize": 4096})

NBYTES = HEADER.itemsize + CALLS_KEPT * CALL_RECORD.itemsize


def parts(memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Header, of shape (1,), and entries of a record in its bytes."""
    header = memory[: HEADER.itemsize].view(HEADER)
    return header, memory[HEADER.itemsize : NBYTES].view(CALL_RECORD)
