"""Layout of a program table: the rounds of a program as 64-bit numbers, for `table_kernel`.

A table has a header and four sections: rounds, streams, operations and pieces. A round is a range of streams, given by
the index of its first one (the section has one entry more, for the end), and a stream a range of operations that run in
order. An operation works on pieces: ranges of bytes, each at an offset in one of the program's memories. To run a table
on other arrays, only the addresses in its header are changed.
"""

SOURCE, TARGET, SCRATCH, LANDING, ABSOLUTE = range(5)
"""Memories of a program (the first four as in `program`); the base of `ABSOLUTE` is 0: its offsets are addresses."""

IGNORED = ABSOLUTE + 1
"""Memory of an array that the program does not use; its address is stored but never read."""

MEMORIES = IGNORED + 1

# ------------------------------------------------------------------------------------------ the header

ROUND, ROUNDS, ROUNDS_AT, STREAMS_AT, OPERATIONS_AT, FAILED, READ_BUFFER, READ_BUFFER_BYTES, VECTOR = range(9)
"""The current round and the number of rounds; addresses of the sections; the operation that failed; address and length
of memory into which a peer's memory is read before it is reduced; and the first of four words for system calls."""

BASES = VECTOR + 4
"""The first of `MEMORIES` addresses of the memories."""

WRITTEN, MEMORY, OFFSET, NBYTES, ARRAY_WORDS = range(5)
SEND_ARRAY = BASES + MEMORIES
RECV_ARRAY = SEND_ARRAY + ARRAY_WORDS
"""The two arrays that a call passes, each in `ARRAY_WORDS` words: 1 if it is written, the memory that it is, the offset
of that in the array, and its bytes that may not overlap those of the other array."""

SHARED_CORES, DEFERRED, POLLS, CALL_POLLS = range(RECV_ARRAY + ARRAY_WORDS, RECV_ARRAY + ARRAY_WORDS + 4)
"""1 if the core is yielded between polls; 1 if a call only stores the addresses of its arrays; and the polls without
progress after which a wait, and a call, returns."""

STARTABLE, REQUEST, PROGRESS, STARTED_RUN, USES_MPI = range(CALL_POLLS + 1, CALL_POLLS + 6)
HEADER_WORDS = USES_MPI + 1
"""1 if compiled code may start the program for its persistent request; the active request that compiled code advances
and ends, as the address of the object, or 0; the address of the words of the process; 1 from a start of the program to
its end; and 1 if messages over MPI are in it. Then the length of the header."""

ACTIVE_REQUESTS, HAS_THREAD, ATTEMPTS, PROGRESS_WORDS = range(4)
"""Words of the process: the list of active requests, as the address of the object; 1 if the progress thread is awake;
and how often the program has made progress itself. Then their number."""

# ------------------------------------------------------------------------------------------ the sections

FIRST, STOP, POSITION, STREAM_WORDS = range(4)
"""Words of a stream: its first operation, the end, and the next one. Then their number, `STREAM_WORDS`."""

KIND, EDGE, LABEL, BY_ADDRESS_LABEL, BYTES, PIECES, PIECE_COUNT, KERNEL, MINE_FIRST, DEPENDENCY, NUMBER = range(11)
OPERATION_WORDS = 12
"""Words of an operation: its kind; address of the numbers of its edge, or of its message over MPI; labels of an eager
message and of one that is sent by its address, 0 if it is not; bytes; address of the first of its pieces, and their
number; the reduction kernel (0: a copy), and 1 if the own operand is the left one; the address of the stream or
operation that it waits for; and the number of its message (0 for an eager one) or of the operations that it waits for.
Then the number of words."""

SEND_MESSAGE, RECEIVE_MESSAGE, LOCAL_WORK, WAIT_STREAM, WAIT_READ, START_SEND, START_RECEIVE, WAIT_MESSAGE = range(8)
CHECK_MAILBOX = WAIT_MESSAGE + 1
"""Kinds: send a message; receive one and copy or reduce it; copy or reduce memory; wait until a stream has done a
number of operations; wait until a message sent by its address was read; start a send or a receive over MPI; wait for
its end; fail if a message has arrived."""

PEER, TAG, COMM, DATATYPE, RECEIVES, MPI_REQUEST, ERROR, COUNT, STATUS = range(9)
MESSAGE_WORDS = STATUS + 8
"""Words of a message over MPI: rank, tag, and handles of communicator and datatype; 1 for a receive; the request, the
last error, the bytes received and the status. Then their number."""

LENGTH, LEFT, LEFT_AT, RIGHT, RIGHT_AT, OUT, OUT_AT = range(7)
PIECE_WORDS = 8
"""Words of a piece: its bytes; memory and offset of the left or only operand, of the right operand, and of the result.
Then the number of words."""

# ------------------------------------------------------------------------------------------ results of the kernel

DONE, WAITING, REFUSED, MISMATCH, UNREADABLE, FAILED_IN_MPI = range(6)
"""The program has ended; it waits for a peer; nothing was done, as the call or its arrays are not those expected, or
compiled code does not manage the request; a message of another call or length came; a peer's memory cannot be
accessed; a function of the MPI has failed."""

RESULT = 7
"""Bits of the result in the number that a call returns; the bits above are the number of the entry it has started."""

# ------------------------------------------------------------------------------------------ calls

STARTED, CHANNEL_COUNT, HELD = range(3)
"""Words of the channels that calls take in turn: the calls started so far, the number of channels (a power of two), and
for each one its calls that hold their programs. No other call starts on it meanwhile."""

ENTRY_COUNT, CHANNELS, ARRAYS = range(3)
ENTRIES = ARRAYS + 2
"""Words of the calls of a method: the number of entries, the address of the words of the channels, the two array
objects of a call, and the entries."""

TABLE, CHECKS, CHECK_COUNT, NO_ARRAY, CHANNEL, ENTRY_WORDS = range(6)
"""Words of an entry: addresses of the program's table, and of its first check; the number of checks; an array object
for a call without arrays; and the channel of the program. Then their number."""

MAX_ENTRIES = 16
"""Entries of a method for each channel; the oldest one goes first."""

HANDLE_AT, HANDLE_BYTES, NULL_HANDLE, HANDLES_KEPT, HANDLES = range(5)
MAX_HANDLES = 64
"""Words of the complete MPI handles kept for later requests: the offset of the handle in a request object, its bytes,
the address of MPI.REQUEST_NULL's, the number of handles, and a word for each, at most `MAX_HANDLES`."""

CHECK, VALUE, ITEM_COUNT, ARRAY, DTYPE, DIMENSIONS, ITEM_BYTES, ARRAY_BYTES, ARGUMENT, DEPTH, PATH = range(11)
MAX_DEPTH = 3
CHECK_WORDS = PATH + 2 * MAX_DEPTH
"""Words of a check of an argument, or of an item in its lists and tuples: its kind; the object or type that is
expected; the length of a list or tuple; for an array the buffers that it is (bit 0: of the send buffer, bit 1: of the
receive buffer), its dtype object, number of dimensions, and bytes of an element and of the array; the number of the
argument; and the path to the item: for each level its index, and 1 if it is in a list. Then their number."""

IS_OBJECT, IS_SEQUENCE, IS_ARRAY = range(3)
"""Kinds: the same object; a list or tuple of a length; an array."""
