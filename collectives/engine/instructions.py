"""Data that Python and the compiled engine share: the rows of a program, links between ranks, results.

A program consists of rounds, a round of streams, and a stream of rows that run in order. Streams progress independently
of each other; rows wait for rows of other streams where that is necessary. A row works on operands: ranges of bytes at
an offset in one of the program's memories. To run a program on other arrays, only the addresses of memories change.

Each dtype is a struct of ``layout.h``, field by field; a test compares them.
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
"""Labels of a mark: of messages of so many bytes beside the flag, and of others. See `mailbox.label`."""

KIND = 1 << 18
"""Flags are the number of the message times this, plus its label. Numbers have 45 bits: enough for a year of
messages."""

MOST_SEGMENTS = 32
"""Segments of a shared heap that a link knows."""

# Memories of a program.
SOURCE = 0  # the user's send buffer
TARGET = 1  # the user's receive buffer
SCRATCH = 2  # chunks that are only forwarded
LANDING = 3  # operands that arrive before they are reduced
SEND_BUFFER = 4  # the user's send buffer, if the source is a packed copy
RECEIVE_BUFFER = 5  # the user's receive buffer, if the target is a packed copy
ABSOLUTE = 6  # memory at offset 0: offsets are addresses
IGNORED = 7  # an array that the program does not use
MEMORIES = 8  # their number


class Kind(IntEnum):
    """Kind of a row."""

    SEND = 0  # send a message through a mailbox
    RECV = 1  # receive one, and copy it or reduce it into the operands
    LOCAL = 2  # copy or reduce memory of this rank
    WAIT_STREAM = 3  # wait until a stream has done a number of rows
    WAIT_READ = 4  # wait until the receiver has read a message sent by address
    NET_SEND = 5  # start a send by the MPI
    NET_RECV = 6  # start a receive by the MPI
    NET_WAIT = 7  # wait for the end of either
    EXPECT_NONE = 8  # fail if a message of the peer has arrived
    CALL = 9  # call a Python function, again and again while it returns False


# Results of the engine.
DONE = 0  # the program has ended
WAITING = 1  # it waits for a peer
REFUSED = 2  # nothing was done: the arguments are not those expected, or Python manages the request
MISMATCH = 3  # a message of another call or length has arrived
UNREADABLE = 4  # the memory of a peer cannot be accessed
FAILED_IN_MPI = 5  # a function of the MPI has failed
RAISED = 6  # a Python function has raised an error, which the engine raises
QUEUED = 7  # the call waits for its channel, and nothing was done yet

RESULT_BITS = 3
"""Bits of the result in the number that a `CallTable` returns. The entry that was started is in the bits above."""

COPY = -1
"""`reduction` of a row that only copies."""

ROW = np.dtype(
    [
        ("label", "i8"),  # of a message beside its flag or in a bounce buffer
        ("address_label", "i8"),  # of a message sent by address, to which the number of addresses is added; 0: none is
        ("nbytes", "i8"),  # of all operands
        ("part", "i8"),  # bytes of the parts in which the message travels through bounce buffers; 0: in one
        ("done", "i8"),  # bytes of the parts that are done in this run
        ("number", "i8"),  # of the message that was sent by address; 0: nothing is to be acknowledged
        ("first_operand", "i4"),  # index of the first operand
        ("operands", "i4"),  # their number
        ("link", "i4"),  # index of the link to the peer, of the network message, or of the function
        ("after", "i4"),  # index of the stream, or of the row of a send, that is waited for
        ("count", "i4"),  # rows that the stream must have done
        ("reduction", "i2"),  # index of the reduction; -1: a copy
        ("kind", "u1"),  # a `Kind`
        ("mine_first", "u1"),  # 1 if the operand of this rank is the left one
    ]
)

OPERAND = np.dtype(
    [
        ("nbytes", "i8"),  # bytes of each side
        ("left_offset", "i8"),  # of the left or only operand, in its memory
        ("right_offset", "i8"),  # of the right operand
        ("out_offset", "i8"),  # of the result
        ("left", "i4"),  # memory of the left or only operand
        ("right", "i4"),  # memory of the right operand
        ("out", "i4"),  # memory of the result
        ("unused", "i4"),  # padding
    ]
)

STREAM = np.dtype(
    [
        ("first", "i8"),  # index of the first row
        ("stop", "i8"),  # index after the last row
        ("position", "i8"),  # index of the next row
    ]
)

SCALE = np.dtype(
    [
        ("pieces", "i8"),  # into which the elements of a call are cut
        ("grain", "i8"),  # elements of which all pieces but the last are multiples, if there are enough
        ("itemsize", "i8"),  # bytes of an element
        ("mark", "i8"),  # of the call, without its length
        ("call_bytes", "i8"),  # bytes of the call for each element
        ("cell_bytes", "i8"),  # bytes of a bounce buffer
        ("part", "i8"),  # bytes of the parts of long messages
        ("streamed", "i8"),  # bytes of the longest message that travels in parts
        ("length", "i8"),  # elements for which operands and labels are set now
        ("least", "i8"),  # elements of the shortest call
        ("most", "i8"),  # elements of the longest call
        ("starts", "i8", 5),  # first chunk of source, target, scratch and landing in their order, and the end
        ("mark_bytes", "i8"),  # bytes of the mark for each element
        ("blocks", "i8"),  # of all memories in a program for any counts, whose elements are bytes; else 0
        ("own", "i8", 2),  # of these, this rank's own block in source and target; -1: it is not in both
        ("room", "i8"),  # bytes of scratch, and of landing memory, in a program for any counts
    ]
)

OWN_SEGMENT = np.dtype(
    [
        ("start", "i8"),  # first address in this process
        ("end", "i8"),  # address after the last
    ]
)

PEER_SEGMENT = np.dtype(
    [
        ("start", "i8"),  # first address in the peer's process
        ("end", "i8"),  # address after the last
        ("here", "i8"),  # address of the start in this process
    ]
)

LINK = np.dtype(
    [
        ("sent", "i8"),  # messages sent to the peer
        ("acknowledged", "i8"),  # messages that the peer is known to have read
        ("received", "i8"),  # messages received from the peer
        ("pid", "i8"),  # the peer's process
        ("outbox", "i8"),  # address of the first flag of messages to the peer
        ("inbox", "i8"),  # address of the first flag of messages from the peer
        ("my_ack", "i8"),  # address of the acknowledgement that this rank writes
        ("their_ack", "i8"),  # address of the acknowledgement that the peer writes
        ("cell_bytes", "i8"),  # bytes of a bounce buffer
        ("copied_bytes", "i8"),  # bytes up to which a message is copied into a bounce buffer
        ("short_bytes", "i8"),  # bytes of a short buffer
        ("short_out", "i8"),  # address of the first short buffer of messages to the peer
        ("short_in", "i8"),  # the same of messages from the peer
        ("cells_out", "i8"),  # address of the first bounce buffer of messages to the peer
        ("cells_in", "i8"),  # the same of messages from the peer
        ("my_offer", "i8"),  # address of the offer that this rank writes
        ("their_offer", "i8"),  # address of the offer that the peer writes
        ("writes", "i8"),  # 1 if ranks may write each other's memory
        ("offered", "i8"),  # number of the message that this rank has offered memory for
        ("taken", "i8"),  # chunks of it that this rank has copied
        ("past_caches", "i8"),  # comparisons for which bounce buffers are written by non-temporal stores
        ("until_probe", "i8"),  # messages until the next comparison; -1: never
        ("own_segments", "i8"),  # segments of this rank that the peer has mapped
        ("own", OWN_SEGMENT, MOST_SEGMENTS),  # these segments
        ("peer_segments", "i8"),  # segments of the peer that this rank has mapped
        ("theirs", PEER_SEGMENT, MOST_SEGMENTS),  # these segments
    ]
)

# Words of a link that count messages.
SENT = 0  # sent to the peer
ACKNOWLEDGED = 1  # that the peer is known to have read
RECEIVED = 2  # received from the peer

NET_MESSAGE = np.dtype(
    [
        ("peer", "i8"),  # rank of the peer in the communicator
        ("tag", "i8"),  # tag of the message
        ("comm", "i8"),  # handle of the communicator
        ("datatype", "i8"),  # handle of the datatype of bytes
        ("receives", "i8"),  # 1 for a receive
        ("request", "i8"),  # handle of the request of the MPI
        ("error", "i8"),  # last error of the MPI
        ("count", "i8"),  # bytes received
        ("status", "i8", 8),  # the MPI's status of a receive
    ]
)

CALLS_KEPT = 512
"""Calls in the record of a rank, the last ones: a power of two."""


class CallState(IntEnum):
    """State of a call in the record."""

    IS_ACTIVE = 0  # the call has started
    HAS_ENDED = 1
    HAS_FAILED = 2
    WAS_LEFT = 3  # before its end, by an error or Ctrl-C, or by another call of the same program


CALL_RECORD = np.dtype(
    [
        ("number", "i8"),  # of the call in this process, from 1; 0 while the entry is written
        ("turn", "i8"),  # number of the call among those of its channel, from 1: the same on all ranks
        ("started", "i8"),  # nanoseconds of the monotonic clock
        ("ended", "i8"),  # the same; 0 before the end
        ("nbytes", "i8"),  # message size n of cost formulas
        ("communicator", "i8"),  # number that all its ranks know it by
        ("channel", "i4"),  # of the communicator's mailboxes; -1: without
        ("root", "i4"),  # -1: none
        ("round", "i4"),  # that the call waits for if it waits long, else -1
        ("peer", "i4"),  # the same: the rank in MPI.COMM_WORLD, else -1
        ("state", "u1"),  # a `CallState`
        ("form", "u1"),  # 0 blocking, 1 non-blocking, 2 persistent
        ("collective", "S14"),
        ("algorithm", "S32"),
        ("dtype", "S8"),
        ("op", "S8"),
    ]
)

MAX_DEPTH = 3
"""Levels of lists and tuples in an argument of a call whose items are checked."""

CHECK = np.dtype(
    [
        ("kind", "i8"),  # of the argument, one of those below
        ("value", "i8"),  # address of the object, or of the type, that is expected
        ("length", "i8"),  # of a list or tuple
        ("buffers", "i8"),  # an array is the send buffer (bit 0), the receive buffer (bit 1)
        ("dtype", "i8"),  # address of the dtype object of an array, or of the format of another buffer
        ("dimensions", "i8"),  # number of them
        ("nbytes", "i8"),  # of the array; -1: any. Of an element of IS_BLOCKS
        ("content", "i8"),  # address of the bytes that an array of counts must hold
        ("argument", "i8"),  # number of the argument
        ("depth", "i8"),  # levels of lists and tuples above the item
        ("path", [("index", "i8"), ("is_list", "i8")], MAX_DEPTH),  # place of the item in each of these levels
    ]
)

# Kinds of arguments of a call.
IS_OBJECT = 0  # the same object
IS_SEQUENCE = 1  # a list or tuple of a length
IS_ARRAY = 2  # an array
IS_BUFFER = 3  # another object with a buffer
IS_HANDLE = 4  # the same operation or datatype of a user's, not freed
IS_COUNTS = 5  # an array of counts, whose bytes are compared
IS_BLOCKS = 6  # a buffer of any counts, for a program for these

# Words of the channels that calls take in turn.
STARTED = 0  # calls started so far
CHANNEL_COUNT = 1  # number of the channels, a power of two
HELD = 2  # first of a word for each channel: its calls that hold their programs, while no other call starts on it

CLASS_WORDS = 2
"""Words of a set of size classes, with a bit for each. See `any_length.class_number`."""

# Words of the process.
HAS_THREAD = 0  # 1 if the progress thread is awake
ATTEMPTS = 1  # how often the program has made progress itself
PROGRESS_WORDS = 2  # their number


FRAME = 512
"""Bytes of the first message of a Python object."""


class Content(IntEnum):
    """Content of a frame."""

    PLAIN = 0  # an object of Python's own types, see `plain`
    PICKLED = 1  # an object
    FAILED = 2  # the text of the error in place of an object


FRAME_HEAD = np.dtype([
    ("length", np.int64),  # bytes of the object, of which the first follow in the frame
    ("buffers", np.int32),  # arrays of the object that are sent by themselves
    ("content", np.int32),  # a `Content`
])  # fmt: skip
"""First fields of a frame."""
