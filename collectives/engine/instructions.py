"""Data that Python and the compiled engine share: the rows of a program, links between ranks, results.

A program consists of rounds, a round of streams, and a stream of rows that run in order. Streams progress independently
of each other; rows wait for rows of other streams where that is necessary. A row works on operands: ranges of bytes at
an offset in one of the program's memories. To run a program on other arrays, only the addresses of memories change.

Each dtype is a struct of ``layout.h``, field by field, with the comments there; a test compares them.
"""

from enum import IntEnum

import numpy as np

SLOTS = 16
"""Messages under way from one rank to another: a rank need not wait for each one to be received, which matters most if
ranks share cores. Each has a bounce buffer: these do not fit into a core's own cache together, so that the lines of one
have left the receiver's cache before the sender writes it again and need not be taken from there."""

LINE = 128
"""Bytes from one flag to the next: two cache lines, a pair of which processors fetch together."""

WORDS = LINE // 8
"""Words of 8 bytes from one flag to the next."""

INLINE = 56
"""Bytes that fit beside a flag."""

ADDRESSES = 3
"""Most (address, bytes) pairs in a slot."""

SHORT_SPACING = 2
"""Distance of two short buffers, in their length: a processor that reads one fetches lines after its end, too, and the
sender would have to take these back."""

SPREAD = 1 << 13
"""Bytes from which messages shorter than a bounce buffer use all of it in turn, for the same reason as all slots."""

LABELS = 64
"""Labels of a mark: of messages of so many bytes beside the flag, and of others; see `mailbox.label`."""

KIND = 1 << 18
"""Flags are the number of the message times this, plus its label. Numbers have 45 bits: enough for a year of
messages."""

MOST_SEGMENTS = 32
"""Segments of a shared heap that a link knows."""

SOURCE, TARGET, SCRATCH, LANDING, SEND_BUFFER, RECEIVE_BUFFER, ABSOLUTE, IGNORED, MEMORIES = range(9)
"""Memories of a program: the user's buffers, scratch for forwarded chunks, landing memory for operands. Where source or
target is a packed copy, the user's buffer is `SEND_BUFFER` or `RECEIVE_BUFFER`. Offsets in `ABSOLUTE` are addresses;
an array that the program does not use is `IGNORED`. Then their number."""


class Kind(IntEnum):
    """Kind of a row."""

    SEND = 0
    RECV = 1
    LOCAL = 2
    WAIT_STREAM = 3
    WAIT_READ = 4
    NET_SEND = 5
    NET_RECV = 6
    NET_WAIT = 7
    EXPECT_NONE = 8
    CALL = 9


DONE, WAITING, REFUSED, MISMATCH, UNREADABLE, FAILED_IN_MPI, RAISED, QUEUED = range(8)
"""Results of the engine. The program has ended; it waits for a peer; nothing was done, as the arguments are not those
expected, or Python manages the request; a message of another call or length came; the memory of a peer cannot be
accessed; a function of the MPI has failed; a Python function has raised an error, which the engine raises; the call
waits for its channel, and nothing was done yet."""

RESULT_BITS = 3
"""Bits of the result in the number that a `CallTable` returns; the entry that was started is in the bits above."""

COPY = -1
"""`reduction` of a row that only copies."""

ROW = np.dtype(
    [
        ("label", "i8"),
        ("address_label", "i8"),
        ("nbytes", "i8"),
        ("part", "i8"),
        ("done", "i8"),
        ("number", "i8"),
        ("first_operand", "i4"),
        ("operands", "i4"),
        ("link", "i4"),
        ("after", "i4"),
        ("count", "i4"),
        ("reduction", "i2"),
        ("kind", "u1"),
        ("mine_first", "u1"),
    ]
)

OPERAND = np.dtype(
    [
        ("nbytes", "i8"),
        ("left_offset", "i8"),
        ("right_offset", "i8"),
        ("out_offset", "i8"),
        ("left", "i4"),
        ("right", "i4"),
        ("out", "i4"),
        ("unused", "i4"),
    ]
)

STREAM = np.dtype([("first", "i8"), ("stop", "i8"), ("position", "i8")])

SCALE = np.dtype(
    [
        ("pieces", "i8"),
        ("grain", "i8"),
        ("itemsize", "i8"),
        ("mark", "i8"),
        ("call_bytes", "i8"),
        ("cell_bytes", "i8"),
        ("part", "i8"),
        ("streamed", "i8"),
        ("length", "i8"),
        ("least", "i8"),
        ("most", "i8"),
        ("starts", "i8", 4),
    ]
)

OWN_SEGMENT = np.dtype([("start", "i8"), ("end", "i8")])

PEER_SEGMENT = np.dtype([("start", "i8"), ("end", "i8"), ("here", "i8")])

LINK = np.dtype(
    [
        ("sent", "i8"),
        ("acknowledged", "i8"),
        ("received", "i8"),
        ("pid", "i8"),
        ("outbox", "i8"),
        ("inbox", "i8"),
        ("my_ack", "i8"),
        ("their_ack", "i8"),
        ("cell_bytes", "i8"),
        ("copied_bytes", "i8"),
        ("short_bytes", "i8"),
        ("short_out", "i8"),
        ("short_in", "i8"),
        ("cells_out", "i8"),
        ("cells_in", "i8"),
        ("my_offer", "i8"),
        ("their_offer", "i8"),
        ("writes", "i8"),
        ("offered", "i8"),
        ("taken", "i8"),
        ("past_caches", "i8"),
        ("until_probe", "i8"),
        ("own_segments", "i8"),
        ("own", OWN_SEGMENT, MOST_SEGMENTS),
        ("peer_segments", "i8"),
        ("theirs", PEER_SEGMENT, MOST_SEGMENTS),
    ]
)

SENT, ACKNOWLEDGED, RECEIVED = range(3)
"""Words of a link that count messages."""

NET_MESSAGE = np.dtype(
    [
        ("peer", "i8"),
        ("tag", "i8"),
        ("comm", "i8"),
        ("datatype", "i8"),
        ("receives", "i8"),
        ("request", "i8"),
        ("error", "i8"),
        ("count", "i8"),
        ("status", "i8", 8),
    ]
)

MAX_DEPTH = 3
"""Levels of lists and tuples in an argument of a call whose items are checked."""

CHECK = np.dtype(
    [
        ("kind", "i8"),
        ("value", "i8"),
        ("length", "i8"),
        ("buffers", "i8"),
        ("dtype", "i8"),
        ("dimensions", "i8"),
        ("nbytes", "i8"),
        ("content", "i8"),
        ("argument", "i8"),
        ("depth", "i8"),
        ("path", [("index", "i8"), ("is_list", "i8")], MAX_DEPTH),
    ]
)

IS_OBJECT, IS_SEQUENCE, IS_ARRAY, IS_BUFFER, IS_HANDLE, IS_COUNTS = range(6)
"""`kind` of a check: the same object; a list or tuple of a length; an array; another object with a buffer; the same
operation or datatype of a user's, not freed; an array of counts, whose bytes are compared."""

STARTED, CHANNEL_COUNT, HELD = range(3)
"""Words of the channels that calls take in turn: the calls started so far, the number of channels (a power of two), and
for each one its calls that hold their programs. No other call starts on it meanwhile."""

CLASS_WORDS = 2
"""Words of a set of size classes, with a bit for each; see `any_length.class_number`."""

HAS_THREAD, ATTEMPTS, PROGRESS_WORDS = range(3)
"""Words of the process: 1 if the progress thread is awake, and how often the program has made progress itself. Then
their number."""
